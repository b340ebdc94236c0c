/* An LSTM cell's state from its gates, and the gradients back, each in one pass over memory; lstm_state.py loads it.

   A call is described by a `step`: G cells with a forget gate for each of A children, width H; cells without any child
   may have gates for them too. What is read may lie anywhere: row g of a table with an index is row index[g]; without
   one it is row g; with a stride of 0 one row stands for all. Compiled twice, for float and double; the compiler
   vectorises the loops, exponential included. */

#include <math.h>
#include <string.h>

#define JOIN(name, real) name##_##real
#define EXPAND(name, real) JOIN(name, real)
#define NAME(name) EXPAND(name, REAL)

#ifndef REAL

/* As lstm_state.py's Step, field by field. Addresses of numbers are of float or double, those of indices of long. */
struct step {
    long cells, forgets, children, width;                  /* G, A, A or 0, H */
    const void *gates;                                     /* rows ((3 + A) H,), in the order i, o, f of each child, u */
    long gates_stride;
    const void *bias;                                      /* rows that are added to the gates first */
    const long *bias_index;
    long bias_stride;
    const void *c_children;                                /* rows (H,), child a of cell g by index g * A + a */
    const long *children_index;
    void *h, *c, *pushed;                                  /* (G, H), contiguous; pushed, h once more, may be absent */
    const void *dh, *dc, *dpushed;                         /* gradients that reach them; may be absent */
    const long *dh_index, *dc_index, *dpushed_index;
    long dh_stride, dc_stride, dpushed_stride;
    void *d_gates, *d_children;                            /* (G, (3 + A) H), (G, A, H), contiguous */
};

static inline long at(const long *index, long row) { return index ? index[row] : row; }

#define REAL float
#define EXP expf
#include "lstm.c"
#undef REAL
#undef EXP
#define REAL double
#define EXP exp
#include "lstm.c"

#else

static inline REAL NAME(sigmoid)(REAL x) { return 1 / (1 + EXP(-x)); }

static inline REAL NAME(tanh)(REAL x) { return 2 / (1 + EXP(-2 * x)) - 1; }

static void NAME(input)(long H, const REAL *restrict i, const REAL *restrict b_i, const REAL *restrict u,
                        const REAL *restrict b_u, REAL *restrict c)
{
    for (long j = 0; j < H; j++)
        c[j] = NAME(sigmoid)(i[j] + b_i[j]) * NAME(tanh)(u[j] + b_u[j]);
}

static void NAME(keep)(long H, const REAL *restrict f, const REAL *restrict b_f, const REAL *restrict c_child,
                       REAL *restrict c)
{
    for (long j = 0; j < H; j++)
        c[j] += NAME(sigmoid)(f[j] + b_f[j]) * c_child[j];
}

static void NAME(output)(long H, const REAL *restrict o, const REAL *restrict b_o, const REAL *restrict c,
                         REAL *restrict h)
{
    for (long j = 0; j < H; j++)
        h[j] = NAME(sigmoid)(o[j] + b_o[j]) * NAME(tanh)(c[j]);
}

/* The states of the cells from start to end - 1. */
void NAME(state)(long start, long end, const struct step *s)
{
    const long H = s->width, A = s->forgets, u = (2 + A) * H;
    for (long g = start; g < end; g++) {
        const REAL *gates = (const REAL *)s->gates + g * s->gates_stride;
        const REAL *bias = (const REAL *)s->bias + at(s->bias_index, g) * s->bias_stride;
        REAL *h = (REAL *)s->h + g * H, *c = (REAL *)s->c + g * H;
        NAME(input)(H, gates, bias, gates + u, bias + u, c);
        for (long a = 0, f = 2 * H; a < s->children; a++, f += H)
            NAME(keep)(H, gates + f, bias + f, (const REAL *)s->c_children + at(s->children_index, g * A + a) * H, c);
        NAME(output)(H, gates + H, bias + H, c, h);
        if (s->pushed) memcpy((REAL *)s->pushed + g * H, h, H * sizeof(REAL));
    }
}

/* What reaches c, and the gradient of o. */
static void NAME(output_back)(long H, const REAL *restrict o, const REAL *restrict b_o, const REAL *restrict c,
                              const REAL *restrict dh, const REAL *restrict dc, REAL *restrict d_o,
                              REAL *restrict to_c)
{
    for (long j = 0; j < H; j++) {
        const REAL gate = NAME(sigmoid)(o[j] + b_o[j]), value = NAME(tanh)(c[j]);
        d_o[j] = dh[j] * value * gate * (1 - gate);
        to_c[j] = dc[j] + dh[j] * gate * (1 - value * value);
    }
}

static void NAME(keep_back)(long H, const REAL *restrict f, const REAL *restrict b_f, const REAL *restrict c_child,
                            const REAL *restrict to_c, REAL *restrict d_f, REAL *restrict d_child)
{
    for (long j = 0; j < H; j++) {
        const REAL gate = NAME(sigmoid)(f[j] + b_f[j]);
        d_child[j] = to_c[j] * gate;
        d_f[j] = to_c[j] * c_child[j] * gate * (1 - gate);
    }
}

/* The gradient of u takes the place of what reaches c. */
static void NAME(input_back)(long H, const REAL *restrict i, const REAL *restrict b_i, const REAL *restrict u,
                             const REAL *restrict b_u, REAL *restrict d_i, REAL *restrict to_c)
{
    for (long j = 0; j < H; j++) {
        const REAL gate = NAME(sigmoid)(i[j] + b_i[j]), value = NAME(tanh)(u[j] + b_u[j]);
        d_i[j] = to_c[j] * value * gate * (1 - gate);
        to_c[j] *= gate * (1 - value * value);
    }
}

static const REAL *NAME(row)(const void *table, const long *index, long stride, long g)
{
    return (const REAL *)table + at(index, g) * stride;
}

/* The gradients of gates and of the children's c. Where h is pushed, what reaches it there is added in the room for the
   gradient of i, which is written last but for u's. */
void NAME(state_back)(long start, long end, const struct step *s)
{
    const long H = s->width, A = s->forgets, u = (2 + A) * H;
    for (long g = start; g < end; g++) {
        const REAL *gates = (const REAL *)s->gates + g * s->gates_stride;
        const REAL *bias = NAME(row)(s->bias, s->bias_index, s->bias_stride, g);
        const REAL *dh = NAME(row)(s->dh, s->dh_index, s->dh_stride, g);
        const REAL *dc = NAME(row)(s->dc, s->dc_index, s->dc_stride, g);
        REAL *d_gates = (REAL *)s->d_gates + g * (u + H), *to_c = d_gates + u;
        if (s->dpushed) {
            const REAL *pushed = NAME(row)(s->dpushed, s->dpushed_index, s->dpushed_stride, g);
            for (long j = 0; j < H; j++) d_gates[j] = dh[j] + pushed[j];
            dh = d_gates;
        }
        NAME(output_back)(H, gates + H, bias + H, (const REAL *)s->c + g * H, dh, dc, d_gates + H, to_c);
        for (long a = 0, f = 2 * H; a < s->children; a++, f += H)
            NAME(keep_back)(H, gates + f, bias + f, (const REAL *)s->c_children + at(s->children_index, g * A + a) * H,
                            to_c, d_gates + f, (REAL *)s->d_children + (g * A + a) * H);
        if (!s->children) memset(d_gates + 2 * H, 0, A * H * sizeof(REAL));
        NAME(input_back)(H, gates, bias, gates + u, bias + u, d_gates, to_c);
    }
}

#endif
