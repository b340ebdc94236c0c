/* Tokens -> gated results of the experts they go to, and the gradients back; compiled_experts.py loads it.

   Rows are tokens' visits to experts, sorted by expert: row r is entry order[r] of the (T, k) gates. A thread takes the
   rows from start to end - 1, an expert's in chunks that stay in a processor's second cache from a token's row to the
   row of its result. PADDING comes after each row that lies there or is kept: at powers of two apart rows would push
   each other out of the first cache. A block of results stays in registers while everything that adds to it goes by.
   Where many rows use a weight, it is packed before; with few, fetching it takes as long as multiplying, so the next
   one is fetched meanwhile. Inputs, hidden and outputs are multiples of 128 bytes. Compiled twice: float and double. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define JOIN(name, real) name##_##real
#define EXPAND(name, real) JOIN(name, real)
#define NAME(name) EXPAND(name, REAL)

#ifndef REAL

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* gcc gives a loop of its own more registers */
#define UNROLL _Pragma("GCC unroll 16")
#define NEAR (1 << 19) /* bytes: a weight for which there is room beside another in a processor's second cache */
#define WORTH_PACKING 56 /* rows */
#define WORTH_TRANSPOSING 32
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
enum { SET, ADD, AWAY }; /* what becomes of a block of results */

/* What registers hold: vectors of BYTES, and the sums of ROWS rows of two of them. */
#if defined(__AVX512F__)
#define BYTES 64
#define ROWS 12
#define STREAM(to, vector) _mm512_stream_si512((void *)(to), (__m512i)(vector))
#elif defined(__AVX__)
#define BYTES 32
#define ROWS 6
#define STREAM(to, vector) _mm256_stream_si256((void *)(to), (__m256i)(vector))
#else
#define BYTES 16
#define ROWS 6
#endif

/* How many the next part takes of what is left, so that all parts are of about one size, at most `most`. */
INLINE long share(long left, long most)
{
    const long parts = (left + most - 1) / most;
    return (left + parts - 1) / parts;
}

#define REAL float
#define BITS uint32_t
#define LANES (BYTES / 4)
#define MINUS_INFINITY 0xff800000
#include "experts.c"
#undef REAL
#undef BITS
#undef LANES
#undef MINUS_INFINITY
#undef EVEN
#undef ODD
#undef LOWER
#undef UPPER
#define REAL double
#define BITS uint64_t
#define LANES (BYTES / 8)
#define MINUS_INFINITY 0xfff0000000000000
#include "experts.c"

#else

typedef REAL NAME(vector) __attribute__((vector_size(BYTES), aligned(__alignof__(REAL)), may_alias));
#define VECTOR NAME(vector)
#define AT(address) (*(VECTOR *)(address))
#define PANEL (2 * LANES)
#define PADDING (64 / (long)sizeof(REAL))

/* compiled_experts.py has the same. Gradients are named after what they are of. */
typedef struct {
    long experts, k, inputs, hidden, outputs, chunk, room;     /* room: numbers in a chunk's rows, at any width */
    const long *lasts, *order;                                 /* where each expert's rows end; (R,) */
    const REAL *const *hidden_weights, *const *output_weights; /* of each expert (inputs, hidden), (hidden, outputs) */
    const REAL *x, *gates;                                     /* (T, inputs), (T, k) */
    REAL *hidden_rows, *result;        /* (R, hidden + PADDING) or none, (T, k, outputs) */
    const REAL *of_result;             /* (T, outputs) */
    REAL *of_hidden, *of_gates, *of_x; /* (R, hidden + PADDING), (T, k), (T, k, inputs) or none */
    REAL *const *of_hidden_weights, *const *of_output_weights;
} NAME(layer);

/* What is written for somebody else to read goes straight to memory: a cache would first read what was there. */
INLINE void NAME(store)(REAL *to, VECTOR value, const int how)
{
#ifdef STREAM
    if (how == AWAY && (size_t)to % BYTES == 0) {
        STREAM(to, value);
        return;
    }
#endif
    if (how == ADD) value += AT(to);
    AT(to) = value;
}

/* c (rows, PANEL) = a (rows, K) b (K, PANEL); a_row is from a row of a to the next, a_k from a column to the next. */
INLINE void NAME(block)(const int rows, const int how, long K, const REAL *a, long a_row, long a_k, const REAL *b,
                        long b_k, const REAL *fetch, long fetch_k, REAL *c, long c_row)
{
    VECTOR sums[ROWS][2];
    UNROLL for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (VECTOR){0};
    for (long k = 0; k < K; k++, a += a_k, b += b_k, fetch += fetch_k) {
        const VECTOR b0 = AT(b), b1 = AT(b + LANES);
        if (how == SET) {
            __builtin_prefetch(fetch, 0, 2);
            __builtin_prefetch(fetch + LANES, 0, 2);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            sums[r][0] += a[r * a_row] * b0;
            sums[r][1] += a[r * a_row] * b1;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        NAME(store)(c + r * c_row, sums[r][0], how);
        NAME(store)(c + r * c_row + LANES, sums[r][1], how);
    }
}

#define BLOCK(n)                                                                     \
    case n:                                                                          \
        if (n <= ROWS)                                                               \
            NAME(block)(n, how, K, a, a_row, a_k, b, b_k, fetch, fetch_k, c, c_row); \
        break;

INLINE void NAME(blocks)(int rows, const int how, long K, const REAL *a, long a_row, long a_k, const REAL *b, long b_k,
                         const REAL *fetch, long fetch_k, REAL *c, long c_row)
{
    switch (rows) {
        BLOCK(1) BLOCK(2) BLOCK(3) BLOCK(4) BLOCK(5) BLOCK(6)
        BLOCK(7) BLOCK(8) BLOCK(9) BLOCK(10) BLOCK(11) BLOCK(12)
    }
}

/* right (rows, O) = left (rows, I) times weight; next is the weight that comes after it. */
APART void NAME(times)(long rows, long I, long O, const REAL *left, const REAL *weight, const REAL *next, REAL *right,
                       REAL *packed)
{
    const int near = I * O * (long)sizeof(REAL) <= NEAR;
    for (long j = 0; j < O; j += PANEL) {
        const REAL *panel = weight + j, *fetch = near ? next + j * I : weight + j + PANEL;
        long stride = O, fetch_k = near ? PANEL : O;
        if (rows >= WORTH_PACKING) {
            for (long i = 0; i < I; i++)
                UNROLL for (int v = 0; v < PANEL; v += LANES) AT(packed + i * PANEL + v) = AT(panel + i * O + v);
            panel = packed, stride = PANEL;
        }
        for (long r = 0, some; r < rows; r += some, fetch = weight, fetch_k = 0) {
            some = share(rows - r, ROWS);
            NAME(blocks)(some, SET, I, left + r * (I + PADDING), I + PADDING, 1, panel, stride, fetch, fetch_k,
                         right + r * (O + PADDING) + j, O + PADDING);
        }
    }
}

/* weight (I, O), its rows from start to end - 1 = the sum over rows of left times right, or that added to it */
APART void NAME(outer)(long rows, long I, long O, long start, long end, const REAL *left, const REAL *right,
                       REAL *weight, int add)
{
    for (long i = start, some; i < end; i += some) {
        some = share(end - i, ROWS);
        for (long j = 0; j < O; j += PANEL)
            if (add)
                NAME(blocks)(some, ADD, rows, left + i, 1, I + PADDING, right + j, O + PADDING, right, 0,
                             weight + i * O + j, O);
            else
                NAME(blocks)(some, AWAY, rows, left + i, 1, I + PADDING, right + j, O + PADDING, right, 0,
                             weight + i * O + j, O);
    }
}

#if LANES == 2
#define EVEN 0, 2
#define ODD 1, 3
#define LOWER 0, 2
#define UPPER 1, 3
#elif LANES == 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define LOWER 0, 4, 1, 5
#define UPPER 2, 6, 3, 7
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define LOWER 0, 8, 1, 9, 2, 10, 3, 11
#define UPPER 4, 12, 5, 13, 6, 14, 7, 15
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif
#define HALVE(n)                                                              \
    UNROLL for (int m = 0; m < LANES / n; m++)                                \
        v[m] = __builtin_shufflevector(v[2 * m], v[2 * m + 1], EVEN) +        \
               __builtin_shufflevector(v[2 * m], v[2 * m + 1], ODD);

/* The sums of each of LANES vectors, in order. */
INLINE VECTOR NAME(sums)(VECTOR *v)
{
    HALVE(2) HALVE(4) HALVE(8) HALVE(16)
    return v[0];
}

/* packed (O, PANEL) = the PANEL rows of O from weight, transposed */
APART void NAME(transpose)(long O, const REAL *weight, REAL *packed)
{
    for (long o = 0; o < O; o += LANES)
        for (int part = 0; part < PANEL; part += LANES) {
            VECTOR v[LANES], other[LANES];
            UNROLL for (int m = 0; m < LANES; m++) v[m] = AT(weight + (part + m) * O + o);
            UNROLL for (int turn = 1; turn < LANES; turn *= 2) {
                UNROLL for (int m = 0; m < LANES; m++) other[m] = v[m];
                UNROLL for (int m = 0; m < LANES / 2; m++) {
                    v[2 * m] = __builtin_shufflevector(other[m], other[m + LANES / 2], LOWER);
                    v[2 * m + 1] = __builtin_shufflevector(other[m], other[m + LANES / 2], UPPER);
                }
            }
            UNROLL for (int m = 0; m < LANES; m++) AT(packed + (o + m) * PANEL + part) = v[m];
        }
}

/* left (rows, LANES) = right (rows, O) times weight (LANES, O) transposed; rows divides LANES. */
INLINE void NAME(dots)(const int rows, long I, long O, const REAL *right, const REAL *weight, long ahead, REAL *left)
{
    const int columns = LANES / rows;
    for (long i = 0; i < LANES; i += columns, weight += columns * O) {
        VECTOR v[LANES];
        UNROLL for (int n = 0; n < LANES; n++) v[n] = (VECTOR){0};
        for (long o = 0; o < O; o += LANES) {
            VECTOR w[LANES];
            UNROLL for (int c = 0; c < columns; c++) w[c] = AT(weight + c * O + o);
            UNROLL for (int c = 0; c < columns; c++) __builtin_prefetch(weight + c * O + o + ahead, 0, 2);
            UNROLL for (int r = 0; r < rows; r++) {
                const VECTOR x = AT(right + r * (O + PADDING) + o);
                UNROLL for (int c = 0; c < columns; c++) v[r * columns + c] += w[c] * x;
            }
        }
        const VECTOR totals = NAME(sums)(v);
        UNROLL for (int r = 0; r < rows; r++)
            memcpy(left + r * (I + PADDING) + i, (const REAL *)&totals + r * columns, columns * sizeof(REAL));
    }
}

#define DOTS(rows)                                                                                                     \
    APART void NAME(dots_of_##rows)(long I, long O, const REAL *right, const REAL *weight, long ahead, REAL *left)     \
    {                                                                                                                  \
        NAME(dots)(MIN(rows, LANES), I, O, right, weight, ahead, left);                                                \
    }
DOTS(1) DOTS(2) DOTS(4)

/* left (rows, I) = right (rows, O) times weight transposed */
APART void NAME(times_transposed)(long rows, long I, long O, const REAL *right, const REAL *weight, const REAL *next,
                                  REAL *left, REAL *packed)
{
    const int near = I * O * (long)sizeof(REAL) <= NEAR;
    if (rows >= WORTH_TRANSPOSING) {
        for (long i = 0; i < I; i += PANEL) {
            const REAL *fetch = near ? next + i * O : weight;
            long fetch_k = near ? PANEL : 0;
            NAME(transpose)(O, weight + i * O, packed);
            for (long r = 0, some; r < rows; r += some, fetch = weight, fetch_k = 0) {
                some = share(rows - r, ROWS);
                NAME(blocks)(some, SET, O, right + r * (O + PADDING), O + PADDING, 1, packed, PANEL, fetch, fetch_k,
                             left + r * (I + PADDING) + i, I + PADDING);
            }
        }
        return;
    }
    for (long i = 0; i < I; i += LANES) {
        long ahead = near ? next - weight : LANES * O;
        for (long r = 0, some; r < rows; r += some, ahead = 0) {
            some = rows - r >= 4 && LANES >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
            (some == 4 ? NAME(dots_of_4) : some == 2 ? NAME(dots_of_2) : NAME(dots_of_1))(
                I, O, right + r * (O + PADDING), weight + i * O, ahead, left + r * (I + PADDING) + i);
        }
    }
}

/* to (rows, width) = the tokens' rows */
INLINE void NAME(gather)(const NAME(layer) *l, long first, long rows, long width, const REAL *tokens, REAL *to)
{
    for (long r = 0; r < rows; r++)
        memcpy(to + r * (width + PADDING), tokens + l->order[first + r] / l->k * width, width * sizeof(REAL));
}

/* to, or the rows of to at their places in order = from (rows, width) times the gates */
INLINE void NAME(gated)(const NAME(layer) *l, long first, long rows, long width, const REAL *from, REAL *to,
                        const int places)
{
    for (long r = 0; r < rows; r++) {
        const REAL gate = l->gates[l->order[first + r]], *source = from + r * (width + PADDING);
        REAL *restrict target = to + (places ? l->order[first + r] * width : r * (width + PADDING));
        for (long j = 0; j < width; j++) target[j] = source[j] * gate;
    }
}

/* Negative numbers become 0; what is not a number stays that, which -ffast-math would not promise of a comparison. */
INLINE void NAME(rectify)(long numbers, REAL *values)
{
    BITS *bits = (BITS *)values, bit = (BITS)1 << (8 * sizeof(BITS) - 1);
    for (long n = 0; n < numbers; n++) bits[n] = bits[n] - bit <= (BITS)MINUS_INFINITY - bit ? 0 : bits[n];
}

/* Gradients of gates, and of hidden rows by their results without gate those before gate and rectifier. Of a gate:
   gradient times result, which is (hidden W) gradient = hidden (W gradient). */
INLINE void NAME(hidden_back)(const NAME(layer) *l, long first, long rows)
{
    for (long r = first; r < first + rows; r++) {
        const REAL *restrict hidden = l->hidden_rows + r * (l->hidden + PADDING), gate = l->gates[l->order[r]];
        REAL *restrict gradient = l->of_hidden + r * (l->hidden + PADDING), sum = 0;
        for (long j = 0; j < l->hidden; j++) {
            sum += gradient[j] * hidden[j];
            gradient[j] = hidden[j] > 0 ? gradient[j] * gate : 0;
        }
        l->of_gates[l->order[r]] = sum;
    }
}

/* Every chunk of the rows from start to end - 1: rows from r of expert n */
#define CHUNKS                                                                               \
    for (long n = 0; n < l->experts && (n ? l->lasts[n - 1] : 0) < end; n++)                 \
        for (long r = MAX(start, n ? l->lasts[n - 1] : 0), to = MIN(end, l->lasts[n]), rows; \
             r < to && (rows = share(to - r, l->chunk)); r += rows)

#define NEXT(weights) (weights)[r + rows == to && n + 1 < l->experts ? n + 1 : n]

/* result, and where wanted hidden_rows */
void NAME(forward)(long start, long end, const NAME(layer) *l, REAL *scratch)
{
    REAL *some_rows = scratch, *more_rows = some_rows + l->room, *packed = more_rows + l->room;
    CHUNKS {
        REAL *hidden = l->hidden_rows ? l->hidden_rows + r * (l->hidden + PADDING) : more_rows;
        NAME(gather)(l, r, rows, l->inputs, l->x, some_rows);
        NAME(times)(rows, l->inputs, l->hidden, some_rows, l->hidden_weights[n], l->output_weights[n], hidden, packed);
        NAME(rectify)(rows * (l->hidden + PADDING), hidden);
        NAME(times)(rows, l->hidden, l->outputs, hidden, l->output_weights[n], NEXT(l->hidden_weights), some_rows,
                    packed);
        NAME(gated)(l, r, rows, l->outputs, some_rows, l->result, 1);
    }
}

/* of_hidden, of_gates and where wanted of_x */
void NAME(backward)(long start, long end, const NAME(layer) *l, REAL *scratch)
{
    REAL *some_rows = scratch, *packed = some_rows + l->room;
    CHUNKS {
        REAL *of_hidden = l->of_hidden + r * (l->hidden + PADDING);
        const REAL *next = l->of_x ? l->hidden_weights[n] : NEXT(l->output_weights);
        NAME(gather)(l, r, rows, l->outputs, l->of_result, some_rows);
        NAME(times_transposed)(rows, l->hidden, l->outputs, some_rows, l->output_weights[n], next, of_hidden, packed);
        NAME(hidden_back)(l, r, rows);
        if (!l->of_x) continue;
        NAME(times_transposed)(rows, l->inputs, l->hidden, of_hidden, l->hidden_weights[n], NEXT(l->output_weights),
                               some_rows, packed);
        for (long m = 0; m < rows; m++)
            memcpy(l->of_x + l->order[r + m] * l->inputs, some_rows + m * (l->inputs + PADDING),
                   l->inputs * sizeof(REAL));
    }
}

/* of_hidden_weights and of_output_weights; threads that share the rows of an expert share its weights' rows */
void NAME(weights)(long start, long end, const NAME(layer) *l, REAL *scratch)
{
    const long I = l->inputs, H = l->hidden, O = l->outputs;
    for (long n = 0, first = 0; n < l->experts; first = l->lasts[n++]) {
        const long last = l->lasts[n], all = last - first;
        const long from = MAX(start, first) - first, to = MIN(end, last) - first; /* of these rows */
        for (long r = first, rows; from < to && r < last; r += rows) {
            rows = share(last - r, l->chunk);
            NAME(gather)(l, r, rows, I, l->x, scratch);
            NAME(outer)(rows, I, H, I * from / all, I * to / all, scratch, l->of_hidden + r * (H + PADDING),
                        l->of_hidden_weights[n], r > first);
            NAME(gather)(l, r, rows, O, l->of_result, scratch);
            NAME(gated)(l, r, rows, O, scratch, scratch, 0);
            NAME(outer)(rows, H, O, H * from / all, H * to / all, l->hidden_rows + r * (H + PADDING), scratch,
                        l->of_output_weights[n], r > first);
        }
    }
#ifdef STREAM
    _mm_sfence();
#endif
}

#undef VECTOR
#undef AT
#undef PANEL
#undef PADDING
#undef BLOCK
#undef DOTS
#undef HALVE
#endif
