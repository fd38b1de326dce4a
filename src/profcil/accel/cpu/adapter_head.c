/* An epoch of steps on adapter and head for one client, on one core. The reference is `run_epoch` in
   adapter_head_epoch.py.

   A batch is stored [features, examples], with SIMD vectors along the examples. Each of a step's eight matrix products
   then reads one factor by scalars, in any memory order, and the other by vectors. Rows of the latter are padded with
   zeros to whole vectors. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The sums of a tile, ROWS x PANEL vectors, fill the registers. FIRST and SECOND interleave the lower and the upper
   halves of two vectors. */
#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 6, PANEL = 4 };
#define FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 6, PANEL = 4 };
#define FIRST 0, 4, 1, 5
#define SECOND 2, 6, 3, 7
#elif defined(__AVX2__)
enum { LANES = 8, ROWS = 6, PANEL = 2 };
#define FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND 4, 12, 5, 13, 6, 14, 7, 15
#else
#error "no faster than torch on this processor"
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));
#define SIMD _Pragma("omp simd") /* for a loop with independent iterations */
#define ALWAYS static inline __attribute__((always_inline))
#if defined(__clang__)
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (whole){__VA_ARGS__})
#endif

/* -- products ------------------------------------------------------------------------------------------------------ */

typedef struct { const float *at; long row, column; } Numbers; /* element (m, k) is at[m row + k column] */
typedef struct { const float *at; long stride; } Vectors;
typedef struct { float *at; long stride; int more; } Into;     /* `more`: add to the present values */

/* One tile of the product; its last vector has `lanes` used lanes. */
ALWAYS void tile(const int rows, const int vectors, long depth, Numbers a, Vectors b, Into c, long lanes)
{
    vec sum[ROWS][PANEL] = {0};
    for (long k = 0; k < depth; k++) {
        vec x[PANEL];
        for (int v = 0; v < vectors; v++) x[v] = *(const vec *)(b.at + k * b.stride + v * LANES);
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < vectors; v++) sum[m][v] += a.at[m * a.row + k * a.column] * x[v];
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < vectors; v++) {
            float *to = c.at + m * c.stride + v * LANES;
            if (lanes < LANES && v == vectors - 1)
                for (int i = 0; i < lanes; i++) to[i] = sum[m][v][i] + (c.more ? to[i] : 0);
            else if (c.more)
                *(vec *)to += sum[m][v];
            else
                *(vec *)to = sum[m][v];
        }
}

ALWAYS void panel(const int vectors, long rows, long depth, Numbers a, Vectors b, Into c, long lanes)
{
    long m = 0;
    for (; m + ROWS <= rows; m += ROWS, a.at += ROWS * a.row, c.at += ROWS * c.stride)
        tile(ROWS, vectors, depth, a, b, c, lanes);
    for (; m < rows; m++, a.at += a.row, c.at += c.stride) tile(1, vectors, depth, a, b, c, lanes);
}

/* c = a b with `rows` x `columns` results, each a sum of `depth` terms. */
static void product(long rows, long columns, long depth, Numbers a, Vectors b, Into c)
{
    while (columns > 0) {
        const long left = (columns + LANES - 1) / LANES, vectors = left < PANEL ? left : PANEL;
        const long lanes = columns < vectors * LANES ? columns - (vectors - 1) * LANES : LANES;
        switch (vectors) {
        case 1: panel(1, rows, depth, a, b, c, lanes); break;
        case 2: panel(2, rows, depth, a, b, c, lanes); break;
#if defined(__AVX512F__) || defined(__aarch64__)
        case 3: panel(3, rows, depth, a, b, c, lanes); break;
        case 4: panel(4, rows, depth, a, b, c, lanes); break;
#endif
        }
        b.at += PANEL * LANES, c.at += PANEL * LANES, columns -= PANEL * LANES;
    }
}

/* Transposes a block of LANES x LANES by repeatedly interleaving the first half of the rows with the second. */
ALWAYS void transpose_block(const float *const *from, long column, Into to)
{
    vec x[LANES], y[LANES];
    for (int k = 0; k < LANES; k++) x[k] = *(const vec *)(from[k] + column);
    for (int width = 1; width < LANES; width *= 2) {
        for (int k = 0; k < LANES / 2; k++) {
            y[2 * k] = MIXED(x[k], x[k + LANES / 2], FIRST);
            y[2 * k + 1] = MIXED(x[k], x[k + LANES / 2], SECOND);
        }
        for (int k = 0; k < LANES; k++) x[k] = y[k];
    }
    for (int k = 0; k < LANES; k++) *(vec *)(to.at + (column + k) * to.stride) = x[k];
}

/* to = fromᵀ; with `index`, of the rows that it names. */
static void transpose(long rows, long columns, const float *from, long stride, const int64_t *index, Into to)
{
    for (long i = 0; i < rows; i += LANES, to.at += LANES) {
        const long some = rows - i < LANES ? rows - i : LANES;
        const float *row[LANES];
        for (long k = 0; k < some; k++) row[k] = from + (index ? index[i + k] : i + k) * stride;
        long j = 0;
        for (; some == LANES && j + LANES <= columns; j += LANES) transpose_block(row, j, to);
        for (; j < columns; j++)
            for (long k = 0; k < some; k++) to.at[j * to.stride + k] = row[k][j];
    }
}

/* -- a step -------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t features, narrow, classes, barred, batch;           /* barred classes come last; their gradients are 0 */
    int64_t down, down_bias, up, up_bias, scale, shift, head, parameters; /* offsets in the vector */
    int64_t kind, time;                                         /* 0 sgd, 1 adam, 2 adamw; steps taken so far */
    double lr, decay, momentum, beta1, beta2, epsilon, proximal, clip;
} EpochPlan;

typedef struct { /* intermediate results of a batch; `…_rows` are stored [examples, …] */
    long wide, examples, narrow; /* padded lengths: features, examples and adapter width */
    float *n_rows, *z_rows, *h_rows, *v, *z, *h, *p, *dz, *dh, *x, *mean, *by;
} Workspace;

ALWAYS long padded(long n) { return (n + LANES - 1) / LANES * LANES; }

ALWAYS vec larger(vec a, vec b) { const whole yes = a > b; return (vec)(((whole)a & yes) | ((whole)b & ~yes)); }

/* e^x for x ≤ 0: 2^k times a polynomial of the remainder, which is at most ln 2 / 2. */
ALWAYS vec power(vec x)
{
    const vec none = {0}, low = none - 87.0f, magic = none + 12582912.0f; /* 1.5·2^23: rounds */
    x = larger(x, low);
    const vec k = (x * 1.44269504f + magic) - magic;
    const vec r = x - k * 0.693359375f + k * 2.12194440e-4f;
    vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120, p = p * r + 1.0f / 24, p = p * r + 1.0f / 6, p = p * r + 0.5f, p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (vec)((__builtin_convertvector(k, whole) + 127) << 23);
}

static float sum(const float *x, long n)
{
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (long i = 0; i < n; i++) s += x[i];
    return s;
}

static float dot(const float *x, const float *y, long n)
{
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (long i = 0; i < n; i++) s += x[i] * y[i];
    return s;
}

/* LayerNorm of the batch's rows without scale and shift; stores mean and inverse standard deviation. */
static void normalise(const EpochPlan *p, Workspace *o, const float *u, const int64_t *index)
{
    const long d = p->features;
    for (long b = 0; b < p->batch; b++) {
        const float *x = u + index[b] * d, *later = u + index[b + 4 < p->batch ? b + 4 : b] * d;
        for (long j = 0; j < d; j += 16) __builtin_prefetch(later + j); /* rows are scattered in memory */
        const float mean = sum(x, d) / d;
        float *n = o->n_rows + b * o->wide;
SIMD
        for (long j = 0; j < d; j++) n[j] = x[j] - mean;
        const float by = 1 / sqrtf(dot(n, n, d) / d + 1e-5f);
SIMD
        for (long j = 0; j < d; j++) n[j] *= by;
        o->mean[b] = mean, o->by[b] = by;
    }
}

/* Replaces the logits by (softmax − one-hot) / rows; writes the losses of the rows if `losses` is given. */
static void logit_gradients(const EpochPlan *p, Workspace *o, const int64_t *labels, float *losses)
{
    const long e = o->examples;
    for (long b = 0; b < e; b += LANES) {
        vec top = *(vec *)(o->p + b), total = {0}, keep = {0};
        for (long c = 1; c < p->classes; c++) top = larger(top, *(vec *)(o->p + c * e + b));
        for (int i = 0; i < LANES && b + i < p->batch; i++) {
            keep[i] = 1.0f / p->batch;
            if (losses) losses[b + i] = top[i] - o->p[labels[b + i] * e + b + i];
        }
        for (long c = 0; c < p->classes; c++) {
            vec *at = (vec *)(o->p + c * e + b);
            total += *at = power(*at - top);
        }
        for (int i = 0; losses && i < LANES && b + i < p->batch; i++) losses[b + i] += logf(total[i]);
        keep /= total;
        for (long c = 0; c < p->classes; c++) *(vec *)(o->p + c * e + b) *= keep;
    }
    for (long b = 0; b < p->batch; b++) o->p[labels[b] * e + b] -= 1.0f / p->batch;
}

static void gradients(const EpochPlan *p, const float *w, float *to, Workspace *o, const float *u, const int64_t *index,
                   const int64_t *labels, float *losses)
{
    const long d = p->features, k = p->narrow, c = p->classes, e = o->examples, n = p->batch;
    const float *down = w + p->down, *up = w + p->up, *head = w + p->head, *scale = w + p->scale, *shift = w + p->shift;
    normalise(p, o, u, index);
    transpose(n, d, u, d, index, (Into){o->z, e, 0});
    for (long j = 0; j < d; j++) {
        float *v = o->v + j * e, *z = o->z + j * e;
        const float *mean = o->mean, *by = o->by, bias = w[p->up_bias + j], times = scale[j], plus = shift[j];
SIMD
        for (long b = 0; b < e; b++) {
            v[b] = (z[b] - mean[b]) * by[b] * times + plus;
            z[b] += bias;
        }
        for (long b = n; b < e; b++) z[b] = 0; /* padding must stay 0 from step to step */
    }
    product(k, e, d, (Numbers){down, d, 1}, (Vectors){o->v, e}, (Into){o->h, e, 0});
    for (long i = 0; i < k; i++) {
        float *h = o->h + i * e, bias = w[p->down_bias + i];
SIMD
        for (long b = 0; b < e; b++) h[b] = h[b] + bias > 0 ? h[b] + bias : 0;
    }
    product(d, e, k, (Numbers){up, k, 1}, (Vectors){o->h, e}, (Into){o->z, e, 1});
    product(c, e, d, (Numbers){head, d, 1}, (Vectors){o->z, e}, (Into){o->p, e, 0});
    logit_gradients(p, o, labels, losses);

    transpose(d, n, o->z, e, 0, (Into){o->z_rows, o->wide, 0});
    product(c, d, n, (Numbers){o->p, e, 1}, (Vectors){o->z_rows, o->wide}, (Into){to + p->head, d, 0});
    memset(to + p->head + c * d, 0, sizeof(float) * p->barred * d);
    product(d, e, c, (Numbers){head, 1, d}, (Vectors){o->p, e}, (Into){o->dz, e, 0});
    for (long j = 0; j < d; j++) to[p->up_bias + j] = sum(o->dz + j * e, n);
    transpose(k, n, o->h, e, 0, (Into){o->h_rows, o->narrow, 0});
    product(d, k, n, (Numbers){o->dz, e, 1}, (Vectors){o->h_rows, o->narrow}, (Into){to + p->up, k, 0});
    product(k, e, d, (Numbers){up, 1, k}, (Vectors){o->dz, e}, (Into){o->dh, e, 0});
    for (long i = 0; i < k * e; i++) o->dh[i] = o->h[i] > 0 ? o->dh[i] : 0;
    product(k, d, n, (Numbers){o->dh, e, 1}, (Vectors){o->n_rows, o->wide}, (Into){o->x, d, 0});
    memset(to + p->scale, 0, sizeof(float) * d);
    memset(to + p->shift, 0, sizeof(float) * d);
    for (long i = 0; i < k; i++) {
        const float *x = o->x + i * d, *row = down + i * d, all = sum(o->dh + i * e, n);
        float *into = to + p->down + i * d, *by_scale = to + p->scale, *by_shift = to + p->shift;
        to[p->down_bias + i] = all;
SIMD
        for (long j = 0; j < d; j++) {
            into[j] = x[j] * scale[j] + all * shift[j];
            by_scale[j] += x[j] * row[j];
            by_shift[j] += all * row[j];
        }
    }
}

/* Proximal term, clipping and update, as in engine/steps.py. */
static void update(EpochPlan *p, float *restrict w, float *restrict g, float *restrict m, float *restrict v,
                   const float *restrict anchor)
{
    const long n = p->parameters;
    const float lr = p->lr, decay = p->decay, epsilon = p->epsilon, momentum = p->momentum;
    if (anchor)
        for (long i = 0; i < n; i++) g[i] += (float)(2 * p->proximal) * (w[i] - anchor[i]);
    float by = 1;
    if (p->clip) {
        const double norm = sqrt(dot(g, g, n)) + 1e-6;
        if (!(norm <= p->clip)) by = p->clip / norm;
    }
    p->time++;
    if (p->kind == 0) {
        for (long i = 0; i < n; i++) {
            m[i] = momentum * m[i] + (by * g[i] + decay * w[i]);
            w[i] -= lr * m[i];
        }
        return;
    }
    const float step_size = lr / (1 - pow(p->beta1, p->time)), root = 1 / sqrt(1 - pow(p->beta2, p->time));
    const float fresh = 1 - p->beta1, old = p->beta2, new = 1 - p->beta2; /* in double: 1 − 0.999f is off by 5e-5 */
    const float coupled = p->kind == 1 ? decay : 0, kept = p->kind == 1 ? 1 : 1 - p->lr * p->decay;
SIMD
    for (long i = 0; i < n; i++) {
        const float own = kept * w[i], gradient = by * g[i] + coupled * own;
        m[i] += fresh * (gradient - m[i]);
        v[i] = old * v[i] + new * gradient * gradient;
        w[i] = own - step_size * m[i] / (sqrtf(v[i]) * root + epsilon);
    }
}

/* -- public functions ---------------------------------------------------------------------------------------------- */

static long lay_out(const EpochPlan *p, float *at, Workspace *o)
{
    const long d = p->features, k = p->narrow, e = padded(p->batch);
    o->wide = padded(d), o->narrow = padded(k), o->examples = e;
    const struct { float **at; long size; } parts[] = {
        {&o->n_rows, p->batch * o->wide}, {&o->z_rows, p->batch * o->wide}, {&o->h_rows, p->batch * o->narrow},
        {&o->v, d * e}, {&o->z, d * e}, {&o->dz, d * e}, {&o->h, k * e}, {&o->dh, k * e}, {&o->p, p->classes * e},
        {&o->x, k * d}, {&o->mean, e}, {&o->by, e},
    };
    long used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].at = at + used;
        used += (parts[i].size + 15) / 16 * 16; /* aligned to cache lines */
    }
    return used;
}

/* The size of the workspace in floats. */
int64_t workspace_size(const EpochPlan *p) { Workspace o; return lay_out(p, 0, &o); }

/* `index` and `labels` are [steps, batch]; so is `losses`, or NULL. */
void epoch(EpochPlan *p, float *w, float *g, float *m, float *v, const float *anchor, const float *u,
           const int64_t *index, const int64_t *labels, int64_t steps, float *space, float *losses)
{
    Workspace o;
    lay_out(p, space, &o);
    for (long i = 0; i < steps * p->batch; i += p->batch) {
        gradients(p, w, g, &o, u, index + i, labels + i, losses ? losses + i : 0);
        update(p, w, g, m, v, anchor);
    }
}
