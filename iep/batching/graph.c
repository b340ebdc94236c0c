/* What takes a step for every node, one after the other; graph.py and schedulers.py load it.

   N nodes, children first, with up to A arguments: args (N, A) are slots, of which the first num_inputs are inputs and
   the next the nodes' own; -1 where there is none. */

/* distance (N,): the longest path from an input to each node, less one. */
void distance_from_leaves_long(long N, long A, long num_inputs, const long *args, long *distance)
{
    for (long n = 0; n < N; n++) {
        long longest = 0;
        for (long a = 0; a < A; a++) {
            const long node = args[n * A + a] - num_inputs;
            if (node >= 0 && distance[node] >= longest) longest = distance[node] + 1;
        }
        distance[n] = longest;
    }
}

/* most (P,), zeros before: of each of P kinds the most nodes on any one path; count (N, P): on those to each node. */
void most_on_a_path_long(long N, long A, long P, long num_inputs, const long *args, const long *kind, long *count,
                         long *most)
{
    for (long n = 0; n < N; n++) {
        long *own = count + n * P;
        for (long p = 0; p < P; p++) own[p] = 0;
        for (long a = 0; a < A; a++) {
            const long node = args[n * A + a] - num_inputs;
            if (node < 0) continue;
            const long *other = count + node * P;
            for (long p = 0; p < P; p++)
                if (other[p] > own[p]) own[p] = other[p];
        }
        own[kind[n]]++;
        for (long p = 0; p < P; p++)
            if (own[p] > most[p]) most[p] = own[p];
    }
}
