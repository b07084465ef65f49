// One token's attention over the rows of one head, by pieces.

#pragma once

#include <vector>

#include "levels.h"
#include "products.h"

namespace {

constexpr i64 ROWS = 256; // of a head in one item
constexpr i64 BLOCK = 8;  // rows that are converted together, and then read by every query head of the group

// By tables [R] whose second halves are like their first.
template <class A> inline void rotate(A *x, const A *cos, const A *sin, i64 R) {
    i64 half = R / 2;
    A *y = x + half;
    each<A>(
        half,
        [&](auto d) {
            auto low = load(x + d), high = load(y + d), by = load(cos + d), turn = load(sin + d);
            keep<A>(x + d, low * by - high * turn);
            keep<A>(y + d, high * by + low * turn);
        },
        [&](i64 d) {
            A low = x[d], high = y[d];
            x[d] = low * cos[d] - high * sin[d];
            y[d] = high * cos[d] + low * sin[d];
        });
}

// to += sum of by[i] x[i] over rows `x [M, n]`.
template <int M, class A> inline void gather(A *to, const A *by, const A *x, i64 n) {
    A weight[M]; // `to` is another place, which the compiler does not know
    UNROLL for (int i = 0; i < M; i++) weight[i] = by[i];
    each<A>(
        n,
        [&](auto d) {
            Wide<A> sum = load(to + d);
            UNROLL for (int i = 0; i < M; i++) sum = added(sum, weight[i] - Wide<A>{}, load(x + i * n + d));
            keep<A>(to + d, sum);
        },
        [&](i64 d) {
            for (int i = 0; i < M; i++) to[d] += weight[i] * x[i * n + d];
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

inline void codes_of(const Packed &p, const uint8_t *codes, i64 row, i64 D, uint8_t *out) {
    i64 bytes = D * p.bits / 8;
    unpack(p.bits, codes + row * bytes, bytes, out);
}

// What attention over some rows of a head gave, before it is joined with the rest of them.
template <class A> struct Partial { A *most, *sum, *out; }; // [G], [G], [G, D]

template <class W, class A> struct Attention {
    const Decoder &m;
    const Rows &rows;
    i64 h;
    const A *query, *key, *value; // of the new token: [G, D], [D], [D]
    double scaling;
    bool turned = false; // whether the query is rotated already
    i64 G = m.query_heads / m.heads;
    i64 start = rows.starts[h], length = rows.lengths[h] + 1, first = 0; // ranks [first, length) are seen
    bool alone = rows.packed && rows.packed->bits == 8; // whether packed rows have steps of their own, and none is in a tail
    i64 tail = rows.packed && !alone ? std::min(length, rows.packed->tail + 1) : 0;
    i64 table_of_keys = rows.packed ? h * rows.packed->groups : 0; // its first group
    i64 some = rows.packed ? channels() / rows.packed->value_groups : 0;                  // channels that share a value's level

    Attention(const Decoder &m, const Rows &rows, i64 h, const A *query, const A *key, const A *value, double scaling)
        : m(m), rows(rows), h(h), query(query), key(key), value(value), scaling(scaling) {
        if (rows.window && length > rows.window) first = length - rows.window;
    }

    i64 channels() const { return CHANNELS ? CHANNELS : m.channels; } // a constant, where it is compiled for it
    i64 place(i64 rank, i64 position) const { return rows.before < 0 ? rank : std::max(rank, position - rows.before); }
    const A *table(const void *t, i64 place) const { return (const A *)t + place * rows.rotated; }
    W *in_tail(void *t, i64 rank) const { return (W *)t + (h * rows.packed->tail_room + rank - (length - tail)) * channels(); }

    void write() const { // the new token's row
        const i64 D = channels(), row = start + length - 1;
        std::vector<A> own(key, key + D);
        if (rows.own_cos) rotate(own.data(), (const A *)rows.own_cos, (const A *)rows.own_sin, rows.rotated);
        std::vector<W> both(alone ? 2 * D : 0);
        W *k = alone ? both.data() : rows.packed ? in_tail(rows.packed->tail_keys, length - 1) : (W *)rows.keys + row * D;
        W *v = alone ? k + D : rows.packed ? in_tail(rows.packed->tail_values, length - 1) : (W *)rows.values + row * D;
        for (i64 d = 0; d < D; d++) store(k[d], own[d]), store(v[d], value[d]);
        if (alone) {
            const Packed &p = *rows.packed;
            std::vector<float> x(D);
            for (i64 d = 0; d < D; d++) x[d] = float(number(k[d]));
            row_codes(x.data(), D, some, p.key_codes + row * D, p.key_step + row * p.value_groups, p.key_zero + row * p.value_groups);
            for (i64 d = 0; d < D; d++) x[d] = float(number(v[d]));
            row_codes(x.data(), D, some, p.value_codes + row * D, p.value_step + row * p.value_groups, p.value_zero + row * p.value_groups);
        } else if (rows.packed && rows.packed->group_bytes == 2) ((int16_t *)rows.packed->group)[row] = -1;
        else if (rows.packed && rows.packed->group_bytes == 4) ((int32_t *)rows.packed->group)[row] = -1;
        rows.positions[row] = int32_t(rows.position);
        rows.scores[row] = 0;
        i64 statistics = __builtin_popcountll(rows.statistics) * (rows.by_head ? 1 + G : 1);
        for (i64 i = 0; i < statistics; i++) rows.stats[i * rows.stats_stride + row] = 0;
    }

    void queries(A *q) const { // [G, D], rotated
        const i64 D = channels();
        memcpy(q, query, G * D * sizeof(A));
        const void *cos = rows.cos ? rows.cos : rows.own_cos, *sin = rows.cos ? rows.sin : rows.own_sin;
        if (!cos || turned) return;
        i64 at = rows.cos ? place(length - 1, rows.position) : 0;
        for (i64 g = 0; g < G; g++) rotate(q + g * D, table(cos, at), table(sin, at), rows.rotated);
    }

    static void convert(const W *from, A *to, i64 n) {
        each<A>(n, [&](auto d) { keep<A>(to + d, load(from + d)); }, [&](i64 d) { to[d] = number(from[d]); });
    }

    void read_key(i64 rank, A *k) const {
        const i64 D = channels(), row = start + rank;
        if (!rows.packed || rank >= length - tail) {
            convert(rows.packed ? in_tail(rows.packed->tail_keys, rank) : (const W *)rows.keys + row * D, k, D);
        } else if (alone) {
            read_packed(rows.packed->key_codes, rows.packed->key_step, rows.packed->key_zero, row, k);
        } else {
            const Packed &p = *rows.packed;
            i64 group = p.group_bytes == 2 ? ((int16_t *)p.group)[row] : ((int32_t *)p.group)[row];
            i64 at = (table_of_keys + group) * D;
            uint8_t codes[MOST_CHANNELS];
            codes_of(p, p.key_codes, row, D, codes);
            const f16 *zero = p.key_zero + at, *step = p.key_step + at;
            each<A>(
                D, [&](auto d) { keep<A>(k + d, load(zero + d) + load(codes + d) * load(step + d)); },
                [&](i64 d) { k[d] = number(zero[d]) + A(codes[d]) * number(step[d]); });
        }
        if (rows.cos) {
            i64 at = rows.before < 0 ? rank : place(rank, rows.positions[row]);
            rotate(k, table(rows.cos, at), table(rows.sin, at), rows.rotated);
        }
    }

    void read_packed(const uint8_t *stored, const f16 *steps, const f16 *zeros, i64 row, A *x) const {
        const i64 D = channels(), groups = rows.packed->value_groups;
        uint8_t own[MOST_CHANNELS];
        const uint8_t *codes = alone ? stored + row * D : own;
        if (!alone) codes_of(*rows.packed, stored, row, D, own);
        for (i64 c = 0; c < groups; c++) {
            A step = number(steps[row * groups + c]), zero = number(zeros[row * groups + c]);
            const uint8_t *from = codes + c * some;
            A *to = x + c * some;
            each<A>(some, [&](auto d) { keep<A>(to + d, zero + load(from + d) * step); }, [&](i64 d) { to[d] = zero + A(from[d]) * step; });
        }
    }

    // Ranks [from, to): logits [G, stride] and what they weigh.
    void attend(i64 from, i64 to, A *logits, i64 stride, Partial<A> part, A *space) const {
        const i64 D = channels();
        A *q = space, *block = q + G * D, *rotated = block + BLOCK * D; // [G, D], [BLOCK, D], [G, D]
        queries(q);
        for (i64 i = 0; i < G * D; i++) q[i] *= A(scaling);
        for (i64 at = from, n; at < to; at += n) {
            n = std::min(BLOCK, to - at);
            for (i64 i = 0; i < n; i++) read_key(at + i, block + i * D);
            for (i64 g = 0; g < G; g++) {
                A *own = logits + g * stride + at - from;
                i64 i = 0;
                for (; i + 4 <= n; i += 4) dots(block + i * D, q + g * D, D, own + i);
                for (; i < n; i++) own[i] = dot(block + i * D, q + g * D, D);
            }
        }
        A *weights = rotated + G * D; // [G, ROWS]: logits may be wanted as they are
        for (i64 g = 0; g < G; g++) {
            A *w = weights + g * ROWS;
            memcpy(w, logits + g * stride, (to - from) * sizeof(A));
            part.most[g] = largest(w, to - from);
            part.sum[g] = exponentials(w, to - from, part.most[g]);
        }
        memset(part.out, 0, G * D * sizeof(A));
        i64 packed = rows.packed ? std::min(std::max(from, length - tail), to) : from;
        if (packed > from) {
            memset(rotated, 0, G * D * sizeof(A));
            for (i64 s = from, n; s < packed; s += n) {
                n = std::min(BLOCK, packed - s);
                for (i64 i = 0; i < n; i++)
                    read_packed(rows.packed->value_codes, rows.packed->value_step, rows.packed->value_zero, start + s + i, block + i * D);
                weigh(block, n, weights + s - from, rotated);
            }
            for (i64 g = 0; !alone && g < G; g++) hadamard(rotated + g * D, D); // as values in fewer bits are
            memcpy(part.out, rotated, G * D * sizeof(A));
        }
        const W *v = rows.packed ? (packed < to ? in_tail(rows.packed->tail_values, packed) : nullptr)
                                 : (const W *)rows.values + (start + packed) * D;
        for (i64 s = packed, n; s < to; s += n, v += n * D) {
            n = std::min(BLOCK, to - s);
            convert(v, block, n * D);
            weigh(block, n, weights + s - from, part.out);
        }
    }

    // out [G, D] += sums of rows `block [n, D]` by weights [G, ROWS].
    void weigh(const A *block, i64 n, const A *weights, A *out) const {
        const i64 D = channels();
        for (i64 g = 0; g < G; g++) {
            const A *own = weights + g * ROWS;
            i64 i = 0;
            for (; i + 4 <= n; i += 4) gather<4>(out + g * D, own + i, block + i * D, D);
            for (; i < n; i++) gather<1>(out + g * D, own + i, block + i * D, D);
        }
    }

    // Join the parts of a head: out [G, D]; `logits` become weights where statistics are kept.
    void join(const std::vector<Partial<A>> &all, A *out, A *logits, i64 stride) const {
        const i64 D = channels();
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

} // namespace
