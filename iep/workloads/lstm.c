/* An LSTM cell's state from its gates, and the gradients back, each in one pass over memory; lstm.py loads it.

   G cells with A children, width H. gates (G, (3 + A) H), in the order i, o, f of each child, u, to which bias is
   added first; c_children (G, A, H); h and c (G, H). Where one row stands for all, its stride is 0. The cells from
   start to end - 1 are computed. Compiled twice, for float and double; the compiler vectorises the loops, exponential
   included. */

#include <math.h>

#define JOIN(name, real) name##_##real
#define EXPAND(name, real) JOIN(name, real)
#define NAME(name) EXPAND(name, REAL)

#ifndef REAL

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

void NAME(state)(long start, long end, long A, long H, const REAL *biases, long bias_stride, const REAL *all_gates,
                 const REAL *c_children, REAL *h, REAL *c)
{
    const long u = (2 + A) * H;
    for (long g = start; g < end; g++) {
        const REAL *bias = biases + g * bias_stride, *gates = all_gates + g * (u + H);
        NAME(input)(H, gates, bias, gates + u, bias + u, c + g * H);
        for (long a = 0, f = 2 * H; a < A; a++, f += H)
            NAME(keep)(H, gates + f, bias + f, c_children + (g * A + a) * H, c + g * H);
        NAME(output)(H, gates + H, bias + H, c + g * H, h + g * H);
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

void NAME(state_back)(long start, long end, long A, long H, const REAL *biases, long bias_stride, const REAL *all_gates,
                      const REAL *c_children, const REAL *c, const REAL *dh, long dh_stride, const REAL *dc,
                      long dc_stride, REAL *d_all_gates, REAL *d_children)
{
    const long u = (2 + A) * H;
    for (long g = start; g < end; g++) {
        const REAL *bias = biases + g * bias_stride, *gates = all_gates + g * (u + H);
        REAL *d_gates = d_all_gates + g * (u + H), *to_c = d_gates + u;
        NAME(output_back)(H, gates + H, bias + H, c + g * H, dh + g * dh_stride, dc + g * dc_stride, d_gates + H, to_c);
        for (long a = 0, f = 2 * H; a < A; a++, f += H) {
            const long child = (g * A + a) * H;
            NAME(keep_back)(H, gates + f, bias + f, c_children + child, to_c, d_gates + f, d_children + child);
        }
        NAME(input_back)(H, gates, bias, gates + u, bias + u, d_gates, to_c);
    }
}

#endif
