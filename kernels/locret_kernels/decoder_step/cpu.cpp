// One decoded token of each of several texts through a whole decoder, on a CPU: weights are read once for all of them.
//
// Compiled for a `TYPE` of weights and rows (32: float32, 64: float64,
// 16: bfloat16) and a number of `CHANNELS` of a head (0: any). Letters: N texts, L layers, E width, Q query heads, H key/value
// heads, G = Q / H, D channels of a head, R of them rotated, S rows. `W` is the type of weights and rows, `A` the type of sums.
// A number is summed in the same order whatever the number of texts and of threads, so a text's numbers do not depend on either.

#include "attention.h"

namespace {

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
        for (i64 n = 0; n < N; n++) read_row<W>(m.words, ids[n], E, x.data() + n * E);
    }

    void run() {
#pragma omp parallel num_threads(team.threads)
        {
            // As many as there are may be fewer than were asked for.
#pragma omp single
            team.threads = omp_get_num_threads();
            Activations eight;
            std::vector<A> h(N * E), space(2 * G * D + BLOCK * D + G * ROWS), local(G * ROWS);
            for (i64 l = 0; l < m.layers; l++) {
                const Layer &at = m.layer[l];
                norm(at.norm, at.norm_eps, h.data());
                if (omp_get_thread_num() == 0) plan(l);
                project(l, {h.data(), N, E, &eight});
                team.wait();
                if (at.query_norm) {
                    team.share(6 * l + 1, N, [&](i64 n) { norm_heads(at, qkv.data() + n * line); });
                    team.wait();
                }
                attention(l, space.data(), local.data());
                team.wait();
                out(l, eight);
                team.wait();
                norm(at.mlp_norm, at.mlp_eps, h.data());
                inwards(l, {h.data(), N, E, &eight});
                team.wait();
                add(6 * l + 5, at.down, at.gate.rows, gate.data(), eight);
                team.wait();
            }
            norm(m.norm, m.eps, h.data());
            Input<A> last{h.data(), N, E, &eight};
            last.prepare(m.head);
            i64 each = share_of<W>(m.head, E);
            team.share(6 * m.layers, parts(V, each), [&](i64 i) {
                product<W, A>(m.head, i * each, std::min(V, (i + 1) * each), last, logits, V);
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

    void project(i64 l, Input<A> h) {
        const Layer &at = m.layer[l];
        const Linear *each[] = {&at.query, &at.key, &at.value};
        i64 some[3], counts[3], offset[] = {0, Q * D, (Q + H) * D};
        for (int i = 0; i < 3; i++) {
            h.prepare(*each[i]);
            some[i] = share_of<W>(*each[i], E), counts[i] = parts(each[i]->rows, some[i]);
        }
        team.share(6 * l, counts[0] + counts[1] + counts[2], [&](i64 item) {
            int i = 0;
            for (; item >= counts[i]; i++) item -= counts[i];
            i64 end = std::min(each[i]->rows, (item + 1) * some[i]);
            product<W, A>(*each[i], item * some[i], end, h, qkv.data() + offset[i], line);
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
        i64 some = share_of<W>(at.fc1, line), score = at.fc1.weight ? parts(at.fc1.rows, some) : 0;
        if (seen)
            if (omp_get_thread_num() == 0) memcpy(seen + l * N * line, qkv.data(), N * line * sizeof(A));
        team.share(6 * l + 2, i64(items.size()) + score, [&](i64 i) {
            if (i >= i64(items.size())) {
                i -= items.size();
                i64 R = at.fc1.rows, first = i * some, end = std::min(R, first + some);
                product<W, A>(at.fc1, first, end, {qkv.data(), N, line}, scored.data(), R);
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
    void out(i64 l, Activations &eight) {
        const Layer &at = m.layer[l];
        add(6 * l + 3, at.out, Q * D, attended.data(), eight);
        if (at.fc2.weight && omp_get_thread_num() == 0)
            score(l, at);
    }

    void score(i64 l, const Layer &at) {
        std::vector<A> scores(N * H);
        product<W, A>(at.fc2, 0, H, {scored.data(), N, at.fc1.rows}, scores.data(), H);
        for (i64 n = 0; n < N; n++)
            for (i64 h = 0; h < H; h++) {
                const Rows &r = rows[n * m.layers + l];
                r.scores[r.starts[h] + r.lengths[h]] = float(scores[n * H + h]);
            }
    }

    void add(i64 phase, const Linear &matrix, i64 K, const A *from, Activations &eight) { // the residual
        i64 each = std::min(share_of<W>(matrix, K), std::max<i64>(4, parts(E, 4 * team.threads) / 4 * 4));
        Input<A> input{from, N, K, &eight};
        input.prepare(matrix);
        team.share(phase, parts(E, each), [&](i64 i) {
            product<W, A>(matrix, i * each, std::min(E, (i + 1) * each), input, x.data(), E, true);
        });
    }

    void inwards(i64 l, Input<A> h) {
        const Layer &at = m.layer[l];
        i64 F = at.gate.rows, each = share_of<W>(at.gate, E);
        h.prepare(at.gate), h.prepare(at.up);
        team.share(6 * l + 4, parts(F, each), [&](i64 i) {
            i64 first = i * each, end = std::min(F, first + each);
            product<W, A>(at.gate, first, end, h, gate.data(), F);
            product<W, A>(at.up, first, end, h, up.data(), F);
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

// Writes 1 where `half` holds every bit of a matrix of `count` numbers in float32, 0 where it does not.
extern "C" void locret_holds(const uint32_t *weight, const uint16_t *half, i64 count, i64 *same, int threads) {
    constexpr i64 AT_ONCE = 4096;
    uint32_t other = 0;
#pragma omp parallel for num_threads(threads) reduction(| : other)
    for (i64 from = 0; from < count; from += AT_ONCE) {
        const i64 end = std::min(from + AT_ONCE, count);
        for (i64 i = from; i < end; i++) other |= weight[i] ^ uint32_t(half[i]) << 16;
    }
    *same = !other;
}
