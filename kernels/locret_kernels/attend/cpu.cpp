// Attention of a chunk over cached rows, with the statistics of its weights where they are wanted: what `__init__.py` beside this
// file defines, of float32 or bfloat16, with sums of float32.
//
// Letters: B texts, Q query heads, H key/value heads, G of a group, T new tokens, S rows, D channels.
// A query's numbers are the same whatever stands beside it and however many threads there are: its sums run over rows in their order,
// and statistics are summed over `UNIT` queries at a time, then over units.

#include <memory>
#include <vector>

#include "layout.h"

namespace {

constexpr int TALL = 6, VECTORS = WIDE == 64 ? 4 : 2, COLUMNS = VECTORS * lanes<float>;
constexpr i64 UNIT = 64, KEYS = 128, TILE = 48; // queries, rows whose values a core's nearest cache holds, rows of weights at a time

// out [TALL, V vectors] becomes (or gains) a [TALL, n] times b [n, V vectors].
template <int V, bool ADD>
inline void product(const float *a, i64 a_row, const float *b, i64 b_row, i64 n, float *out, i64 out_row) {
    wide_f32 sum[TALL][V];
    UNROLL for (int r = 0; r < TALL; r++)
        UNROLL for (int v = 0; v < V; v++) sum[r][v] = ADD ? load(out + r * out_row + v * lanes<float>) : wide_f32{};
    for (i64 i = 0; i < n; i++) {
        wide_f32 line[V];
        UNROLL for (int v = 0; v < V; v++) line[v] = load(b + i * b_row + v * lanes<float>);
        UNROLL for (int r = 0; r < TALL; r++) {
            wide_f32 x = a[r * a_row + i] - wide_f32{};
            UNROLL for (int v = 0; v < V; v++) sum[r][v] = added(sum[r][v], x, line[v]);
        }
    }
    UNROLL for (int r = 0; r < TALL; r++)
        UNROLL for (int v = 0; v < V; v++) keep<float>(out + r * out_row + v * lanes<float>, sum[r][v]);
}

i64 up(i64 n, i64 step) { return (n + step - 1) / step * step; }
std::unique_ptr<float[]> floats(i64 n) { return std::unique_ptr<float[]>(new float[n]); } // of any value

} // namespace

extern "C" {
struct Attention {
    const Weights *q, *k, *v; // [B, Q, T, D], [B, H, S, D]; channels side by side
    float *out;            // [B, T, Q, D]
    i64 q_text, q_head, q_row, k_text, k_head, k_row, v_text, v_head, v_row;
    i64 texts, queries, heads, tokens, rows, channels, type; // type: as `TYPES`
    const float *cos, *sin, *q_cos, *q_sin;                  // [S, R] of rows and [T, R] of queries; null where they are rotated
    i64 rotated;
    float *stats; // [1 + G by head, statistics, B * H, S]
    i64 statistics, by_head; // bits
    double scaling, margin;
};
}

namespace {

struct Attend {
    const Attention &a;
    i64 D = a.channels, S = a.rows, T = a.tokens, G = a.queries / a.heads, width = up(S, COLUMNS), units = up(T, UNIT) / UNIT;
    i64 sets = a.statistics ? 1 + G * a.by_head : 0, kinds = __builtin_popcountll(a.statistics), heads = a.texts * a.heads;
    std::unique_ptr<float[]> keys = floats(heads * width * D); // [B * H, S / COLUMNS, D, COLUMNS]
    std::unique_ptr<float[]> values = floats(a.type == 16 ? heads * S * D : 0);
    std::vector<float> stats = std::vector<float>(heads * units * sets * kinds * width);

    void read(const void *x, i64 at, float *to) const {
        for (i64 d = 0; d < D; d++) to[d] = a.type == 16 ? number(((const bf16 *)x)[at + d]) : ((const float *)x)[at + d];
    }
    void turn(float *x, const float *cos, const float *sin) const {
        i64 half = a.rotated / 2;
        for (i64 d = 0; d < half; d++) {
            float low = x[d], high = x[d + half];
            x[d] = low * cos[d] - high * sin[d], x[d + half] = high * cos[d + half] + low * sin[d + half];
        }
    }

    // A block of a head's keys, channels by rows; and its values, where they are not float32.
    void pack(i64 head, i64 block) {
        i64 text = head / a.heads, h = head % a.heads;
        float *to = keys.get() + (head * width + block * COLUMNS) * D, x[MOST_CHANNELS];
        for (i64 c = 0; c < COLUMNS; c++) {
            i64 s = block * COLUMNS + c;
            if (s < S) {
                read(a.k, text * a.k_text + h * a.k_head + s * a.k_row, x);
                if (a.cos) turn(x, a.cos + s * a.rotated, a.sin + s * a.rotated);
                if (a.type == 16) read(a.v, text * a.v_text + h * a.v_head + s * a.v_row, values.get() + (head * S + s) * D);
            }
            for (i64 d = 0; d < D; d++) to[d * COLUMNS + c] = s < S ? x[d] : 0;
        }
    }

    // Attention of the queries of a unit, and the statistics of their weights.
    void unit(i64 head, i64 number_of) {
        static thread_local std::vector<float> room;
        i64 text = head / a.heads, h = head % a.heads, step = std::max<i64>(1, TILE / G), most = up(G * step, TALL);
        room.resize(most * (width + 2 * D + 1));
        float *weights = room.data(), *q = weights + most * width, *sums = q + most * D, *inverse = sums + most * D;
        const float *k = keys.get() + head * width * D;
        const float *v = a.type == 16 ? values.get() + head * S * D : (const float *)a.v + text * a.v_text + h * a.v_head;
        i64 v_row = a.type == 16 ? D : a.v_row;
        for (i64 at = number_of * UNIT, last = std::min(T, at + UNIT); at < last; at += step) {
            i64 t = std::min(step, last - at), M = G * t, tall = up(M, TALL), n = S - T + at + t, wide = up(n, COLUMNS);
            std::fill(q + M * D, q + tall * D, 0.0f);
            for (i64 r = 0; r < M; r++) {
                i64 i = at + r % t;
                read(a.q, text * a.q_text + (h * G + r / t) * a.q_head + i * a.q_row, q + r * D);
                if (a.q_cos) turn(q + r * D, a.q_cos + i * a.rotated, a.q_sin + i * a.rotated);
                for (i64 d = 0; d < D; d++) q[r * D + d] *= float(a.scaling);
            }
            for (i64 s = 0; s < wide; s += COLUMNS)
                for (i64 r = 0; r < tall; r += TALL)
                    product<VECTORS, false>(q + r * D, D, k + s * D, COLUMNS, D, weights + r * width + s, width);
            for (i64 r = 0; r < M; r++) {
                float *x = weights + r * width;
                i64 seen = S - T + at + r % t + 1;
                inverse[r] = 1 / exponentials(x, seen, largest(x, seen));
                std::fill(x + seen, x + wide, 0.0f);
            }
            std::fill(sums, sums + tall * D, 0.0f);
            for (i64 s = 0; s < n; s += KEYS)
                for (i64 r = 0; r < tall; r += TALL) {
                    const float *own = weights + r * width + s, *line = v + s * v_row;
                    i64 d = 0, rows = std::min(KEYS, n - s);
                    for (; d + COLUMNS <= D; d += COLUMNS)
                        product<VECTORS, true>(own, width, line + d, v_row, rows, sums + r * D + d, D);
                    for (; d < D; d += lanes<float>)
                        product<1, true>(own, width, line + d, v_row, rows, sums + r * D + d, D);
                }
            for (i64 r = 0; r < M; r++) {
                float *to = a.out + ((text * T + at + r % t) * a.queries + h * G + r / t) * D;
                for (i64 d = 0; d < D; d++) to[d] = sums[r * D + d] * inverse[r];
            }
            if (!sets) continue;
            for (i64 i = 0; i < t; i++) {
                i64 seen = S - T + at + i + 1;
                float *to = stats.data() + (head * units + number_of) * sets * kinds * width;
                count(weights + i * width, inverse + i, t, G, seen, to);
                for (i64 g = 0; g < G * a.by_head; g++)
                    count(weights + (g * t + i) * width, inverse + g * t + i, t, 1, seen, to + (1 + g) * kinds * width);
            }
        }
    }

    // The statistics of one query gain the mean weight of `group` of its heads, which are `t` rows apart.
    void count(const float *weights, const float *inverse, i64 t, i64 group, i64 seen, float *to) const {
        const float bound = float(1 + a.margin) / float(seen);
        const float share = 1 / float(group);
        for (i64 s = 0; s < up(seen, lanes<float>); s += lanes<float>) { // weights of rows that it does not see are 0
            wide_f32 own = {};
            for (i64 g = 0; g < group; g++) own = added(own, load(weights + g * t * width + s), inverse[g * t] - wide_f32{});
            own *= share;
            float *at = to + s;
            auto gain = [&](const wide_f32 &x) { keep<float>(at, load(at) + x), at += width; };
            if (a.statistics & ABOVE) gain(own > bound ? (wide_f32){} + 1.0f : (wide_f32){});
            if (a.statistics & SQUARE) gain(own * own);
            if (a.statistics & SUM) gain(own);
        }
    }

    void total(i64 head, i64 set) { // of all units
        for (i64 kind = set * kinds; kind < (set + 1) * kinds; kind++) {
            float *to = a.stats + (kind * heads + head) * S;
            for (i64 n = 0; n < units; n++) {
                const float *from = stats.data() + ((head * units + n) * sets * kinds + kind) * width;
                for (i64 s = 0; s < S; s++) to[s] = n ? to[s] + from[s] : from[s];
            }
        }
    }
};

} // namespace

extern "C" void locret_attend(const Attention *given, int threads) {
    Attend own{*given};
    const i64 heads = own.heads, blocks = own.width / COLUMNS;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (i64 i = 0; i < heads * blocks; i++) own.pack(i / blocks, i % blocks);
#pragma omp for schedule(dynamic)
        for (i64 i = heads * own.units - 1; i >= 0; i--) own.unit(i % heads, i / heads); // the longest first
#pragma omp for schedule(static)
        for (i64 i = 0; i < heads * own.sets; i++) own.total(i / own.sets, i % own.sets);
    }
}
