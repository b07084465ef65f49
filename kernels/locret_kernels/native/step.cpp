// One decoded token of each of several texts through a whole decoder, on a CPU: weights are read once for all of them.
//
// Structures are those of `__init__.py`, field by field. Compiled for a `TYPE` of weights and rows (32: float32, 64: float64,
// 16: bfloat16) and a number of `CHANNELS` of a head (0: any). Letters: N texts, L layers, E width, Q query heads, H key/value
// heads, G = Q / H, D channels of a head, R of them rotated, S rows. `W` is the type of weights and rows, `A` the type of sums.
// A number is summed in the same order whatever the number of texts and of threads, so a text's numbers do not depend on either.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif
#include <omp.h>
#include <sched.h>

#if defined(__AVX512F__)
#define WIDE 64
#elif defined(__AVX__)
#define WIDE 32
#else
#define WIDE 16
#endif

namespace {

using i64 = int64_t;
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

constexpr i64 ROWS = 256;   // of a head in one item of attention
constexpr i64 MOST_CHANNELS = 1024;
constexpr i64 SHARE = 65536; // bytes of weights in one item of a matrix product, about

// ---- structures ------------------------------------------------------------------------------------------------------

extern "C" {
struct Linear { const void *weight, *bias; i64 rows, halved; }; // halved: its float32 numbers are held as bfloat16
struct Layer {
    const void *norm, *query_norm, *key_norm, *mlp_norm;
    Linear query, key, value, out, gate, up, down, fc1, fc2;
    double norm_eps, head_eps, mlp_eps, scaling;
};
struct Decoder {
    i64 layers, width, query_heads, heads, channels, vocabulary;
    const void *words, *norm;
    double eps;
    Linear head;
    const Layer *layer;
};
struct Packed {
    uint8_t *key_codes, *value_codes;
    void *group; // int16 or int32
    const f16 *key_step, *key_zero, *value_step, *value_zero;
    void *tail_keys, *tail_values;
    i64 bits, group_bytes, groups, sharing, value_groups, tail_room, tail;
};
struct Rows {
    void *keys, *values;
    int32_t *positions;
    float *scores, *stats;
    const i64 *starts, *lengths; // before the token
    const void *cos, *sin;       // tables [S, R] by which rows are rotated as they are read
    const void *own_cos, *own_sin; // of the new token [R], where rows are rotated as they are written
    i64 position, rotated, before, window, stats_stride, statistics, by_head; // before: -1, or tokens before true distances
    const Packed *packed;
};
}

enum { ABOVE = 1, SQUARE = 2, SUM = 4 }; // statistics, in the order of their names

// ---- numbers ---------------------------------------------------------------------------------------------------------

template <class A> struct Lanes;
template <> struct Lanes<float> {
    typedef float plain __attribute__((vector_size(WIDE)));
    typedef float wide __attribute__((vector_size(WIDE), aligned(4), may_alias));
};
template <> struct Lanes<double> {
    typedef double plain __attribute__((vector_size(WIDE)));
    typedef double wide __attribute__((vector_size(WIDE), aligned(8), may_alias));
};
typedef uint32_t wide_u32 __attribute__((vector_size(WIDE)));
typedef int32_t wide_i32 __attribute__((vector_size(WIDE)));
typedef float wide_f32 __attribute__((vector_size(WIDE)));
typedef uint16_t half_u16 __attribute__((vector_size(WIDE / 2), aligned(2), may_alias));
typedef uint8_t quarter_u8 __attribute__((vector_size(WIDE / 4), aligned(1), may_alias));
template <class A> constexpr int lanes = WIDE / sizeof(A);

inline float number(float x) { return x; }
inline double number(double x) { return x; }
inline float number(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline float number(f16 x) { // finite ones
    uint32_t bits = uint32_t(x.bits & 0x7fff) << 13, scale = 0x77800000, sign = uint32_t(x.bits & 0x8000) << 16;
    float out, by;
    memcpy(&out, &bits, 4);
    memcpy(&by, &scale, 4); // 2^112, exact for subnormal numbers too
    out *= by;
    memcpy(&bits, &out, 4);
    bits |= sign;
    memcpy(&out, &bits, 4);
    return out;
}
inline void store(float &to, float x) { to = x; }
inline void store(double &to, double x) { to = x; }
inline void store(bf16 &to, float x) { // to the nearest, ties to even, as PyTorch
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline wide_f32 load(const float *p) { return *(const Lanes<float>::wide *)p; }
inline Lanes<double>::plain load(const double *p) { return *(const Lanes<double>::wide *)p; }
inline wide_f32 load(const bf16 *p) {
    return (wide_f32)(__builtin_convertvector(*(const half_u16 *)p, wide_u32) << 16);
}

inline wide_f32 load(const f16 *p) {
#if defined(__AVX512F__)
    return (wide_f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    wide_f32 out;
    for (int i = 0; i < lanes<float>; i++) out[i] = number(p[i]);
    return out;
#endif
}
inline wide_f32 load(const uint8_t *p) { return __builtin_convertvector(*(const quarter_u8 *)p, wide_f32); }

template <class A> using Wide = typename Lanes<A>::plain;
template <class A> inline void keep(A *to, const Wide<A> &v) { memcpy(to, &v, sizeof v); }

// Numbers by vectors where they are float32, and the rest one by one.
template <class A, class F, class G> inline void each(i64 n, F wide, G one) {
    i64 i = 0;
    if constexpr (sizeof(A) == 4)
        for (; i + lanes<A> <= n; i += lanes<A>) wide(i);
    for (; i < n; i++) one(i);
}

// Sums of the numbers of a vector, and of each of four.
template <class V, class A> inline A total(const V &v, A) {
    A part[sizeof(V) / sizeof(A)];
    memcpy(part, &v, sizeof(v));
    for (int n = sizeof(V) / sizeof(A) / 2; n; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
}
template <class V, class A> inline void totals(const V &a, const V &b, const V &c, const V &d, A *out) {
    out[0] = total(a, A()), out[1] = total(b, A()), out[2] = total(c, A()), out[3] = total(d, A());
}
#if defined(__AVX__)
inline __m256 folded(const wide_f32 &v) {
#if defined(__AVX512F__)
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
#else
    return (__m256)v;
#endif
}
inline void totals(const wide_f32 &a, const wide_f32 &b, const wide_f32 &c, const wide_f32 &d, float *out) {
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(folded(a), folded(b)), _mm256_hadd_ps(folded(c), folded(d)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
inline float total(const wide_f32 &v, float) {
    __m256 half = folded(v);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(four, four));
}
#endif

template <class A> inline A dot(const A *a, const A *b, i64 n) {
    Wide<A> sum = {};
    i64 i = 0;
    for (; i + lanes<A> <= n; i += lanes<A>) sum += load(a + i) * load(b + i);
    A out = total(sum, A());
    for (; i < n; i++) out += a[i] * b[i];
    return out;
}

// Of four vectors `a [4, n]` with one.
template <class A> inline void dots(const A *a, const A *b, i64 n, A *out) {
    Wide<A> sum[4] = {};
    i64 i = 0;
    for (; i + lanes<A> <= n; i += lanes<A>)
        for (int r = 0; r < 4; r++) sum[r] += load(a + r * n + i) * load(b + i);
    totals(sum[0], sum[1], sum[2], sum[3], out);
    for (; i < n; i++)
        for (int r = 0; r < 4; r++) out[r] += a[r * n + i] * b[i];
}

inline wide_f32 exponential(wide_f32 x) { // Cephes' polynomial, to about one unit in the last place
    x = x < -87.0f ? (wide_f32){} - 87.0f : x;
    x = x > 88.0f ? (wide_f32){} + 88.0f : x;
    wide_f32 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    wide_f32 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    wide_f32 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (wide_f32)((__builtin_convertvector(n, wide_i32) + 127) << 23);
}

// x becomes exp(x - most), and the sum of those is returned.
inline float exponentials(float *x, i64 n, float most) {
    float sum = 0;
    i64 i = 0;
    wide_f32 wide = {};
    for (; i + lanes<float> <= n; i += lanes<float>) {
        wide_f32 e = exponential(load(x + i) - most);
        wide += e;
        memcpy(x + i, &e, sizeof e);
    }
    sum = total(wide, 0.0f);
    for (; i < n; i++) sum += x[i] = std::exp(x[i] - most);
    return sum;
}
inline double exponentials(double *x, i64 n, double most) {
    double sum = 0;
    for (i64 i = 0; i < n; i++) sum += x[i] = std::exp(x[i] - most);
    return sum;
}

inline void silu(float *x, i64 n) {
    i64 i = 0;
    for (; i + lanes<float> <= n; i += lanes<float>) {
        wide_f32 own = load(x + i), out = own / (1.0f + exponential(-own));
        memcpy(x + i, &out, sizeof out);
    }
    for (; i < n; i++) x[i] /= 1 + std::exp(-x[i]);
}
inline void silu(double *x, i64 n) {
    for (i64 i = 0; i < n; i++) x[i] /= 1 + std::exp(-x[i]);
}

// ---- threads ---------------------------------------------------------------------------------------------------------

struct Team {
    int threads;
    std::atomic<int> arrived{0}, round{0};
    std::unique_ptr<std::atomic<i64>[]> next; // item of each phase

    Team(int threads, i64 phases) : threads(threads), next(new std::atomic<i64>[phases]) {
        for (i64 i = 0; i < phases; i++) next[i].store(0, std::memory_order_relaxed);
    }
    void wait() {
        if (threads == 1) return;
        int mine = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int tries = 0; round.load(std::memory_order_acquire) == mine; tries++)
            if (tries > 4000) sched_yield(); // others may need the core on which the last one shall run
    }
    template <class F> void share(i64 phase, i64 items, F act) { // items are taken one by one, so a slow thread takes fewer
        for (i64 i; (i = next[phase].fetch_add(1, std::memory_order_relaxed)) < items;) act(i);
    }
};

// ---- matrix products -------------------------------------------------------------------------------------------------

template <class W, class A, class B, int R, int M> inline void tile(const W *w, i64 K, const A *x, A *y, i64 stride, bool add, const B *bias) {
    Wide<A> sum[R][M] = {};
    i64 i = 0;
    for (; i + lanes<A> <= K; i += lanes<A>) {
        Wide<A> ws[R];
        for (int r = 0; r < R; r++) ws[r] = load(w + r * K + i);
        for (int m = 0; m < M; m++) {
            Wide<A> xs = load(x + m * K + i);
            for (int r = 0; r < R; r++) sum[r][m] += ws[r] * xs;
        }
    }
    for (int m = 0; m < M; m++) {
        A out[R];
        if constexpr (R == 4) totals(sum[0][m], sum[1][m], sum[2][m], sum[3][m], out);
        else out[0] = total(sum[0][m], A());
        for (int r = 0; r < R; r++) {
            for (i64 j = i; j < K; j++) out[r] += number(w[r * K + j]) * x[m * K + j];
            if (bias) out[r] += number(bias[r]);
            A &to = y[m * stride + r];
            to = add ? to + out[r] : out[r];
        }
    }
}

template <class W, class A, class B, int R>
void row_tiles(const W *w, i64 K, const A *x, i64 N, A *y, i64 stride, bool add, const B *bias) {
    for (; N >= 4; N -= 4, x += 4 * K, y += 4 * stride) tile<W, A, B, R, 4>(w, K, x, y, stride, add, bias);
    if (N == 3) tile<W, A, B, R, 3>(w, K, x, y, stride, add, bias);
    if (N == 2) tile<W, A, B, R, 2>(w, K, x, y, stride, add, bias);
    if (N == 1) tile<W, A, B, R, 1>(w, K, x, y, stride, add, bias);
}

template <class W, class A, class B>
void rows_of(const W *w, const B *bias, i64 first, i64 end, i64 K, const A *x, i64 N, A *y, i64 stride, bool add) {
    for (i64 row = first; row < end;) {
        const B *own = bias ? bias + row : nullptr;
        bool four = row + 4 <= end;
        (four ? row_tiles<W, A, B, 4> : row_tiles<W, A, B, 1>)(w + row * K, K, x, N, y + row, stride, add, own);
        row += four ? 4 : 1;
    }
}

// Rows [first, end) of W x for all texts `x [N, K]`, the bias included, into columns of `y [N, stride]` or added to them.
template <class W, class A>
void product(const Linear &m, i64 first, i64 end, i64 K, const A *x, i64 N, A *y, i64 stride, bool add = false) {
    const W *bias = (const W *)m.bias;
    if constexpr (sizeof(W) == 4)
        if (m.halved) return rows_of((const bf16 *)m.weight, bias, first, end, K, x, N, y, stride, add);
    rows_of((const W *)m.weight, bias, first, end, K, x, N, y, stride, add);
}

template <class W> inline i64 share_of(i64 K) { return std::max<i64>(4, SHARE / i64(K * sizeof(W)) / 4 * 4); }
inline i64 parts(i64 n, i64 each) { return (n + each - 1) / each; }

// As the backbones': in float32 whatever the type, and the weight after rounding to it.
template <class W, class A> inline void rms_norm(const A *x, const void *weight, double eps, i64 n, A *out) {
    const W *w = (const W *)weight;
    float sum = 0;
    wide_f32 wide = {};
    i64 i = 0;
    if constexpr (sizeof(A) == 4) for (; i + lanes<float> <= n; i += lanes<float>) wide += load(x + i) * load(x + i);
    sum = total(wide, 0.0f);
    for (; i < n; i++) sum += float(x[i]) * float(x[i]);
    float by = 1 / std::sqrt(sum / float(n) + float(eps));
    for (i64 j = 0; j < n; j++) out[j] = number(w[j]) * A(float(x[j]) * by);
}

// ---- attention -------------------------------------------------------------------------------------------------------

template <class A> inline void rotate(A *x, const A *cos, const A *sin, i64 R) {
    i64 half = R / 2;
    A *y = x + half;
    const A *high_cos = cos + half, *high_sin = sin + half;
    each<A>(
        half,
        [&](auto d) {
            auto low = load(x + d), high = load(y + d);
            keep<A>(x + d, low * load(cos + d) - high * load(sin + d));
            keep<A>(y + d, high * load(high_cos + d) + low * load(high_sin + d));
        },
        [&](i64 d) {
            A low = x[d], high = y[d];
            x[d] = low * cos[d] - high * sin[d];
            y[d] = high * high_cos[d] + low * high_sin[d];
        });
}

// to += sum of by[i] x[i] over rows `x [M, n]`.
template <int M, class W, class A> inline void gather(A *to, const A *by, const W *x, i64 n) {
    each<A>(
        n,
        [&](auto d) {
            Wide<A> sum = load(to + d);
            for (int i = 0; i < M; i++) sum += by[i] * load(x + i * n + d);
            keep<A>(to + d, sum);
        },
        [&](i64 d) {
            for (int i = 0; i < M; i++) to[d] += by[i] * number(x[i * n + d]);
        });
}

template <class A> inline void hadamard(A *x, i64 D) { // orthonormal, in blocks of the largest power of two that divides D
    i64 side = D & -D;
    A by = A(1) / std::sqrt(A(side));
    for (i64 block = 0; block < D; block += side)
        for (i64 h = 1; h < side; h *= 2)
            for (i64 i = block; i < block + side; i += 2 * h)
                for (i64 j = i; j < i + h; j++) {
                    A a = x[j], b = x[j + h];
                    x[j] = a + b, x[j + h] = a - b;
                }
    for (i64 d = 0; d < D; d++) x[d] *= by;
}

template <int BITS> inline void unpack(const uint8_t *__restrict codes, i64 bytes, uint8_t *__restrict out) {
    constexpr int each = 8 / BITS, mask = (1 << BITS) - 1;
    for (i64 byte = 0; byte < bytes; byte++)
        for (int i = 0; i < each; i++) out[byte * each + i] = (codes[byte] >> (i * BITS)) & mask;
}
inline void codes_of(const Packed &p, const uint8_t *codes, i64 row, i64 D, uint8_t *out) {
    i64 bytes = D * p.bits / 8;
    codes += row * bytes;
    p.bits == 4 ? unpack<4>(codes, bytes, out) : unpack<2>(codes, bytes, out);
}

// What attention over some rows of a head gave, before it is joined with the rest of them.
template <class A> struct Partial { A *most, *sum, *out; }; // [G], [G], [G, D]

template <class W, class A> struct Attention {
    const Decoder &m;
    const Rows &rows;
    i64 h;
    const A *query, *key, *value; // of the new token: [G, D], [D], [D]
    double scaling;
    const i64 D = CHANNELS ? CHANNELS : m.channels;
    i64 G = m.query_heads / m.heads;
    i64 start = rows.starts[h], length = rows.lengths[h] + 1, first = 0; // ranks [first, length) are seen
    i64 tail = rows.packed ? std::min(length, rows.packed->tail + 1) : 0;

    Attention(const Decoder &m, const Rows &rows, i64 h, const A *query, const A *key, const A *value, double scaling)
        : m(m), rows(rows), h(h), query(query), key(key), value(value), scaling(scaling) {
        if (rows.window && length > rows.window) first = length - rows.window;
    }

    i64 place(i64 rank, i64 position) const { return rows.before < 0 ? rank : std::max(rank, position - rows.before); }
    const A *table(const void *t, i64 place) const { return (const A *)t + place * rows.rotated; }
    W *in_tail(void *t, i64 rank) const { return (W *)t + (h * rows.packed->tail_room + rank - (length - tail)) * D; }

    void write() const { // the new token's row
        i64 row = start + length - 1;
        std::vector<A> own(key, key + D);
        if (rows.own_cos) rotate(own.data(), (const A *)rows.own_cos, (const A *)rows.own_sin, rows.rotated);
        W *k = rows.packed ? in_tail(rows.packed->tail_keys, length - 1) : (W *)rows.keys + row * D;
        W *v = rows.packed ? in_tail(rows.packed->tail_values, length - 1) : (W *)rows.values + row * D;
        for (i64 d = 0; d < D; d++) store(k[d], own[d]), store(v[d], value[d]);
        if (rows.packed && rows.packed->group_bytes == 2) ((int16_t *)rows.packed->group)[row] = -1;
        if (rows.packed && rows.packed->group_bytes == 4) ((int32_t *)rows.packed->group)[row] = -1;
        rows.positions[row] = int32_t(rows.position);
        rows.scores[row] = 0;
        i64 statistics = __builtin_popcountll(rows.statistics) * (rows.by_head ? 1 + G : 1);
        for (i64 i = 0; i < statistics; i++) rows.stats[i * rows.stats_stride + row] = 0;
    }

    void queries(A *q) const { // [G, D], rotated
        memcpy(q, query, G * D * sizeof(A));
        const void *cos = rows.cos ? rows.cos : rows.own_cos, *sin = rows.cos ? rows.sin : rows.own_sin;
        if (!cos) return;
        i64 at = rows.cos ? place(length - 1, rows.position) : 0;
        for (i64 g = 0; g < G; g++) rotate(q + g * D, table(cos, at), table(sin, at), rows.rotated);
    }

    void read_key(i64 rank, A *k) const {
        i64 row = start + rank;
        if (!rows.packed || rank >= length - tail) {
            const W *from = rows.packed ? in_tail(rows.packed->tail_keys, rank) : (const W *)rows.keys + row * D;
            each<A>(D, [&](auto d) { keep<A>(k + d, load(from + d)); }, [&](i64 d) { k[d] = number(from[d]); });
        } else {
            const Packed &p = *rows.packed;
            i64 group = p.group_bytes == 2 ? ((int16_t *)p.group)[row] : ((int32_t *)p.group)[row];
            i64 at = (h / p.sharing * p.groups + group) * D;
            uint8_t codes[MOST_CHANNELS];
            codes_of(p, p.key_codes, row, D, codes);
            const f16 *zero = p.key_zero + at, *step = p.key_step + at;
            each<A>(
                D, [&](auto d) { keep<A>(k + d, load(zero + d) + load(codes + d) * load(step + d)); },
                [&](i64 d) { k[d] = number(zero[d]) + A(codes[d]) * number(step[d]); });
        }
        if (rows.cos) {
            i64 at = place(rank, rows.positions[row]);
            rotate(k, table(rows.cos, at), table(rows.sin, at), rows.rotated);
        }
    }

    // Ranks [from, to): logits [G, stride] and what they weigh.
    void attend(i64 from, i64 to, A *logits, i64 stride, Partial<A> part, A *space) const {
        A *q = space, *k = q + G * D, *rotated = k + 4 * D; // [G, D], [4, D], [G, D]
        queries(q);
        for (i64 g = 0; g < G; g++)
            for (i64 d = 0; d < D; d++) q[g * D + d] *= A(scaling);
        i64 at = from;
        for (; at + 4 <= to; at += 4) {
            for (int i = 0; i < 4; i++) read_key(at + i, k + i * D);
            for (i64 g = 0; g < G; g++) dots(k, q + g * D, D, logits + g * stride + at - from);
        }
        for (; at < to; at++) {
            read_key(at, k);
            for (i64 g = 0; g < G; g++) logits[g * stride + at - from] = dot(k, q + g * D, D);
        }
        A *weights = rotated + G * D; // [G, ROWS]: logits may be wanted as they are
        for (i64 g = 0; g < G; g++) {
            A *w = weights + g * ROWS;
            memcpy(w, logits + g * stride, (to - from) * sizeof(A));
            part.most[g] = *std::max_element(w, w + (to - from));
            part.sum[g] = exponentials(w, to - from, part.most[g]);
        }
        memset(part.out, 0, G * D * sizeof(A));
        memset(rotated, 0, G * D * sizeof(A));
        i64 packed = rows.packed ? std::min(std::max(from, length - tail), to) : from;
        for (i64 s = from; s < packed; s++) add_packed(start + s, weights + s - from, rotated, k);
        if (packed > from)
            for (i64 g = 0; g < G; g++) {
                hadamard(rotated + g * D, D);
                for (i64 d = 0; d < D; d++) part.out[g * D + d] = rotated[g * D + d];
            }
        const W *v = rows.packed ? (packed < to ? in_tail(rows.packed->tail_values, packed) : nullptr)
                                 : (const W *)rows.values + (start + packed) * D;
        i64 s = packed;
        for (; s + 4 <= to; s += 4, v += 4 * D)
            for (i64 g = 0; g < G; g++) gather<4>(part.out + g * D, weights + g * ROWS + s - from, v, D);
        for (; s < to; s++, v += D)
            for (i64 g = 0; g < G; g++) gather<1>(part.out + g * D, weights + g * ROWS + s - from, v, D);
    }

    void add_packed(i64 row, const A *weights, A *out, A *v) const {
        const Packed &p = *rows.packed;
        uint8_t codes[MOST_CHANNELS];
        codes_of(p, p.value_codes, row, D, codes);
        i64 some = D / p.value_groups;
        for (i64 c = 0; c < p.value_groups; c++) {
            A step = number(p.value_step[row * p.value_groups + c]), zero = number(p.value_zero[row * p.value_groups + c]);
            const uint8_t *from = codes + c * some;
            A *to = v + c * some;
            each<A>(some, [&](auto d) { keep<A>(to + d, zero + load(from + d) * step); }, [&](i64 d) { to[d] = zero + A(from[d]) * step; });
        }
        for (i64 g = 0; g < G; g++) gather<1>(out + g * D, weights + g * ROWS, v, D);
    }

    // Join the parts of a head: out [G, D]; `logits` become weights where statistics are kept.
    void join(const std::vector<Partial<A>> &all, A *out, A *logits, i64 stride) const {
        for (i64 g = 0; g < G; g++) {
            A most = all[0].most[g], sum = 0;
            for (auto &one : all) most = std::max(most, one.most[g]);
            for (i64 d = 0; d < D; d++) out[g * D + d] = 0;
            for (auto &one : all) {
                A by = std::exp(one.most[g] - most);
                sum += by * one.sum[g];
                for (i64 d = 0; d < D; d++) out[g * D + d] += by * one.out[g * D + d];
            }
            for (i64 d = 0; d < D; d++) out[g * D + d] /= sum;
            if (rows.statistics) {
                exponentials(logits + g * stride, length - first, most);
                for (i64 s = 0; s < length - first; s++) logits[g * stride + s] /= sum;
            }
        }
        if (rows.statistics) count(logits, stride);
    }

    void count(const A *weights, i64 stride) const {
        i64 each = __builtin_popcountll(rows.statistics);
        A above = A(1 + 1e-5) / A(length);
        for (i64 s = 0; s < length - first; s++) {
            A mean = 0;
            for (i64 g = 0; g < G; g++) mean += weights[g * stride + s];
            gain(rows.stats + start + first + s, mean / A(G), above);
            for (i64 g = 0; rows.by_head && g < G; g++)
                gain(rows.stats + (1 + g) * each * rows.stats_stride + start + first + s, weights[g * stride + s], above);
        }
    }
    void gain(float *stat, A weight, A above) const {
        if (rows.statistics & ABOVE) *stat += weight > above, stat += rows.stats_stride;
        if (rows.statistics & SQUARE) *stat += float(weight * weight), stat += rows.stats_stride;
        if (rows.statistics & SUM) *stat += float(weight);
    }
};

// ---- the step --------------------------------------------------------------------------------------------------------

template <class W, class A> struct Step {
    const Decoder &m;
    i64 N;
    const i64 *ids;
    const Rows *rows; // [N, L]
    A *logits;        // [N, V]
    A *seen;          // [L, N, (Q + 2H) D], or null: q, k and v before RoPE
    Team team;
    const i64 D = CHANNELS ? CHANNELS : m.channels;
    i64 E = m.width, Q = m.query_heads, H = m.heads, G = Q / H, V = m.vocabulary, line = (Q + 2 * H) * D, wide = 0, hidden = 0;
    std::vector<A> x, qkv, attended, gate, up, scored;
    // Of attention: items and their parts, a layer at a time.
    struct Item { i64 n, h, from, to, head; };
    std::vector<Item> items;
    std::vector<std::vector<Partial<A>>> heads; // [N * H], each its parts
    std::vector<A> partials, weights;
    std::vector<i64> logits_at;
    std::unique_ptr<std::atomic<i64>[]> left;
    i64 longest = 0;

    Step(const Decoder &m, i64 N, const i64 *ids, const Rows *rows, A *logits, A *seen, int threads)
        : m(m), N(N), ids(ids), rows(rows), logits(logits), seen(seen), team(threads, 6 * m.layers + 1) {
        for (i64 l = 0; l < m.layers; l++) {
            wide = std::max(wide, m.layer[l].gate.rows);
            hidden = std::max(hidden, m.layer[l].fc1.rows);
        }
        x.resize(N * E), qkv.resize(N * line), attended.resize(N * Q * D), gate.resize(N * wide), up.resize(N * wide);
        scored.resize(N * hidden);
        left.reset(new std::atomic<i64>[N * H]);
        for (i64 n = 0; n < N; n++)
            for (i64 e = 0; e < E; e++) x[n * E + e] = number(((const W *)m.words)[ids[n] * E + e]);
    }

    void run() {
#pragma omp parallel num_threads(team.threads)
        {
            // As many as there are may be fewer than were asked for.
#pragma omp single
            team.threads = omp_get_num_threads();
            std::vector<A> h(N * E), space(2 * G * D + 4 * D + G * ROWS), local(G * ROWS);
            for (i64 l = 0; l < m.layers; l++) {
                const Layer &at = m.layer[l];
                norm(at.norm, at.norm_eps, h.data());
                if (omp_get_thread_num() == 0) plan(l);
                project(l, h.data());
                team.wait();
                if (at.query_norm) {
                    team.share(6 * l + 1, N, [&](i64 n) { norm_heads(at, qkv.data() + n * line); });
                    team.wait();
                }
                attention(l, space.data(), local.data());
                team.wait();
                out(l);
                team.wait();
                norm(at.mlp_norm, at.mlp_eps, h.data());
                inwards(l, h.data());
                team.wait();
                add(6 * l + 5, at.down, at.gate.rows, gate.data());
                team.wait();
            }
            norm(m.norm, m.eps, h.data());
            i64 each = share_of<W>(E);
            team.share(6 * m.layers, parts(V, each), [&](i64 i) {
                product<W, A>(m.head, i * each, std::min(V, (i + 1) * each), E, h.data(), N, logits, V);
            });
        }
    }

    void norm(const void *weight, double eps, A *h) { // by every thread for itself
        for (i64 n = 0; n < N; n++) rms_norm<W, A>(x.data() + n * E, weight, eps, E, h + n * E);
    }

    void norm_heads(const Layer &at, A *one) {
        for (i64 i = 0; i < Q + H; i++)
            rms_norm<W, A>(one + i * D, i < Q ? at.query_norm : at.key_norm, at.head_eps, D, one + i * D);
    }

    void project(i64 l, const A *h) {
        const Layer &at = m.layer[l];
        const Linear *each[] = {&at.query, &at.key, &at.value};
        i64 some = share_of<W>(E), counts[3], offset[] = {0, Q * D, (Q + H) * D};
        for (int i = 0; i < 3; i++) counts[i] = parts(each[i]->rows, some);
        team.share(6 * l, counts[0] + counts[1] + counts[2], [&](i64 item) {
            int i = 0;
            for (; item >= counts[i]; i++) item -= counts[i];
            i64 end = std::min(each[i]->rows, (item + 1) * some);
            product<W, A>(*each[i], item * some, end, E, h, N, qkv.data() + offset[i], line);
        });
    }

    // Which rows are attended to together; made by one thread while the others project.
    void plan(i64 l) {
        items.clear(), heads.assign(N * H, {}), logits_at.assign(N * H, 0);
        i64 size = 0, kept = 0;
        for (i64 n = 0; n < N; n++) {
            const Rows &r = rows[n * m.layers + l];
            for (i64 h = 0; h < H; h++) {
                i64 length = r.lengths[h] + 1, first = r.window && length > r.window ? length - r.window : 0;
                i64 count = parts(length - first, ROWS);
                logits_at[n * H + h] = kept;
                if (r.statistics) kept += G * (length - first);
                for (i64 from = first; from < length; from += ROWS)
                    items.push_back({n, h, from, std::min(length, from + ROWS), n * H + h});
                heads[n * H + h].resize(count);
                left[n * H + h].store(count, std::memory_order_relaxed);
                size += count;
            }
        }
        partials.resize(size * G * (D + 2)), weights.resize(kept);
        A *at = partials.data();
        for (auto &head : heads)
            for (auto &part : head) part = {at, at + G, at + 2 * G}, at += G * (D + 2);
    }

    void attention(i64 l, A *space, A *local) {
        const Layer &at = m.layer[l];
        i64 some = share_of<W>(line), score = at.fc1.weight ? parts(at.fc1.rows, some) : 0;
        if (seen)
            if (omp_get_thread_num() == 0) memcpy(seen + l * N * line, qkv.data(), N * line * sizeof(A));
        team.share(6 * l + 2, i64(items.size()) + score, [&](i64 i) {
            if (i >= i64(items.size())) {
                i -= items.size();
                i64 R = at.fc1.rows, first = i * some, end = std::min(R, first + some);
                product<W, A>(at.fc1, first, end, line, qkv.data(), N, scored.data(), R);
                for (i64 n = 0; n < N; n++) silu(scored.data() + n * R + first, end - first);
                return;
            }
            attend(l, items[i], space, local);
        });
    }

    void attend(i64 l, const Item &item, A *space, A *local) {
        const Rows &r = rows[item.n * m.layers + l];
        const A *one = qkv.data() + item.n * line;
        Attention<W, A> head(m, r, item.h, one + item.h * G * D, one + (Q + item.h) * D, one + (Q + H + item.h) * D, m.layer[l].scaling);
        auto &all = heads[item.head];
        if (item.to == head.length) head.write();
        i64 stride = r.statistics ? head.length - head.first : ROWS;
        A *kept = r.statistics ? weights.data() + logits_at[item.head] : local;
        head.attend(item.from, item.to, r.statistics ? kept + item.from - head.first : local, stride,
                    all[(item.from - head.first) / ROWS], space);
        if (left[item.head].fetch_sub(1, std::memory_order_acq_rel) == 1)
            head.join(all, attended.data() + (item.n * Q + item.h * G) * D, kept, stride);
    }

    // The output projection, and what the retaining head makes of its hidden layer.
    void out(i64 l) {
        const Layer &at = m.layer[l];
        add(6 * l + 3, at.out, Q * D, attended.data());
        if (at.fc2.weight && omp_get_thread_num() == 0)
            score(l, at);
    }

    void score(i64 l, const Layer &at) {
        std::vector<A> scores(N * H);
        product<W, A>(at.fc2, 0, H, at.fc1.rows, scored.data(), N, scores.data(), H);
        for (i64 n = 0; n < N; n++)
            for (i64 h = 0; h < H; h++) {
                const Rows &r = rows[n * m.layers + l];
                r.scores[r.starts[h] + r.lengths[h]] = float(scores[n * H + h]);
            }
    }

    void add(i64 phase, const Linear &matrix, i64 K, const A *from) { // the residual
        i64 each = std::min(share_of<W>(K), std::max<i64>(4, parts(E, 4 * team.threads) / 4 * 4));
        team.share(phase, parts(E, each), [&](i64 i) {
            product<W, A>(matrix, i * each, std::min(E, (i + 1) * each), K, from, N, x.data(), E, true);
        });
    }

    void inwards(i64 l, const A *h) {
        const Layer &at = m.layer[l];
        i64 F = at.gate.rows, each = share_of<W>(E);
        team.share(6 * l + 4, parts(F, each), [&](i64 i) {
            i64 first = i * each, end = std::min(F, first + each);
            product<W, A>(at.gate, first, end, E, h, N, gate.data(), F);
            product<W, A>(at.up, first, end, E, h, N, up.data(), F);
            for (i64 n = 0; n < N; n++) {
                A *g = gate.data() + n * F, *u = up.data() + n * F;
                silu(g + first, end - first);
                for (i64 i = first; i < end; i++) g[i] *= u[i];
            }
        });
    }
};

} // namespace

#if TYPE == 32
using Weight = float;
using Sum = float;
#elif TYPE == 64
using Weight = double;
using Sum = double;
#else
using Weight = bf16;
using Sum = float;
#endif

extern "C" void locret_step(const Decoder *m, i64 N, const i64 *ids, const Rows *rows, void *logits, void *seen, int threads) {
    Step<Weight, Sum>(*m, N, ids, rows, (Sum *)logits, (Sum *)seen, threads).run();
}
