// Products of activations with a matrix in few bits: what `__init__.py` beside this file defines, with activations in 8 bits.
//
// Of a few rows of activations, each row of the matrix is read once where it lies (`blocks.h`). Of more, `ROWS` rows are unpacked
// at a time, as far as a core's nearest cache holds them, and multiplied with every row of activations: the lanes of a vector
// are rows of the matrix there, so nothing is summed across lanes. A number does not depend on how many threads or rows there
// are, but for the one change of form at `MANY`. Compiled for a `FORMAT`, one of those of `blocks.h`.

#include <memory>
#include <omp.h>

#include "blocks.h"

namespace {

constexpr i64 MANY = 8;                                              // rows of activations from which on unpacking pays
constexpr i64 ONE_THREAD = 1 << 18;                                  // products below which threads cost more than they save
constexpr int LANES = lanes<float>, PANELS = 2, ROWS = PANELS * LANES; // of the matrix at a time
constexpr int TOKENS = WIDE == 64 ? 8 : 4;                           // that share the codes in registers
typedef int8_t wide_i8 __attribute__((vector_size(WIDE)));
typedef int16_t wide_i16 __attribute__((vector_size(WIDE)));

// A value stays in its register. Without it the compiler adds later, in another order, and keeps every product in memory until
// then; or reads codes again for each product.
template <class V> inline V settled(V value) {
#if WIDE >= 32
    asm("" : "+v"(value));
#endif
    return value;
}

// ---- sums of products, of a few neighbours in each lane --------------------------------------------------------------------

// `Code`, `Own`: types of codes and of activations. NEIGHBOURS: of a lane. `Sum`: where `ADDS<F>` products of vectors may be added.
#if WIDE >= 32
#if WIDE == 64 && defined(__AVX512VNNI__)
#define DOT(sum, a, b) (wide_i32)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b))
#elif WIDE == 32 && defined(DPBUSD)
#define DOT(sum, a, b) (wide_i32)DPBUSD((__m256i)(sum), (__m256i)(a), (__m256i)(b))
#endif
#if WIDE == 64
#define WIDER(name) _mm512_##name
typedef __m512i wide_int;
#else
#define WIDER(name) _mm256_##name
typedef __m256i wide_int;
#endif

struct Bytes { // unsigned codes and bytes: the products of each two neighbours in 16 bits, or of four in 32 with VNNI
    using Code = uint8_t;
    using Own = int8_t;
    static constexpr int NEIGHBOURS = 4;
#if defined(DOT)
    using Sum = wide_i32;
    template <class F> static constexpr int ADDS = 1 << 20;
    static Sum gain(Sum sum, wide_i8 codes, wide_i32 own) { return settled(DOT(sum, codes, own)); }
    static wide_i32 total(Sum sum) { return sum; }
#else
    using Sum = wide_i16;
    template <class F> static constexpr int ADDS = 32767 / (2 * 127 * F::MAX); // before 16 bits are full
    static Sum gain(Sum sum, wide_i8 codes, wide_i32 own) { return settled(sum + (wide_i16)WIDER(maddubs_epi16)((wide_int)codes, (wide_int)own)); }
    static wide_i32 total(Sum sum) { return (wide_i32)WIDER(madd_epi16)((wide_int)sum, WIDER(set1_epi16)(1)); }
#endif
};
struct Words { // 16 bits, for codes of 8 bits without VNNI
    using Code = int16_t;
    using Own = int16_t;
    static constexpr int NEIGHBOURS = 2;
    using Sum = wide_i32;
    template <class F> static constexpr int ADDS = 1 << 20;
    static Sum gain(Sum sum, wide_i8 codes, wide_i32 own) { return settled(sum + (wide_i32)WIDER(madd_epi16)((wide_int)codes, (wide_int)own)); }
    static wide_i32 total(Sum sum) { return sum; }
};
#if defined(DOT)
template <class F> using Dot = Bytes;
#else
template <class F> using Dot = std::conditional_t<F::SIGNED, Words, Bytes>;
#endif
#else
struct Floats { // exact too: integers below 2^24
    using Code = float;
    using Own = float;
    static constexpr int NEIGHBOURS = 1;
    using Sum = wide_f32;
    template <class F> static constexpr int ADDS = 1 << 20;
    static Sum gain(Sum sum, wide_i8 codes, wide_i32 own) { return sum + (wide_f32)codes * (wide_f32)own; }
    static wide_f32 total(Sum sum) { return sum; }
};
template <class F> using Dot = Floats;
#endif
inline wide_f32 floats(const wide_i32 &x) { return __builtin_convertvector(x, wide_f32); }
inline wide_f32 floats(const wide_f32 &x) { return x; }

// ---- a panel: ROWS rows unpacked, LANES side by side --------------------------------------------------------------------------

inline void transpose(eight_i32 *x) { // of eight rows
    typedef eight_i32 V;
    V y[8], z[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        y[i] = __builtin_shuffle(x[i], x[i + 1], V{0, 8, 1, 9, 4, 12, 5, 13});
        y[i + 1] = __builtin_shuffle(x[i], x[i + 1], V{2, 10, 3, 11, 6, 14, 7, 15});
    }
    UNROLL for (int i = 0; i < 8; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            z[i + 2 * j] = __builtin_shuffle(y[i + j], y[i + j + 2], V{0, 1, 8, 9, 4, 5, 12, 13});
            z[i + 2 * j + 1] = __builtin_shuffle(y[i + j], y[i + j + 2], V{2, 3, 10, 11, 6, 7, 14, 15});
        }
    UNROLL for (int i = 0; i < 4; i++) {
        x[i] = __builtin_shuffle(z[i], z[i + 4], V{0, 1, 2, 3, 8, 9, 10, 11});
        x[i + 4] = __builtin_shuffle(z[i], z[i + 4], V{4, 5, 6, 7, 12, 13, 14, 15});
    }
}

// Numbers of a row that are multiplied before those of the next one: 16 KiB of codes in all, of vectors of 32 bytes.
template <class F> constexpr i64 COLUMNS_OF = 1024 / sizeof(typename Dot<F>::Code);

// Rows of activations [N, K], of which `COLUMNS_OF` numbers after another are side by side for all rows: they are read onwards.
template <class F> struct Blocked {
    using Own = typename Dot<F>::Own;
    i64 N, K;
    std::unique_ptr<Own[]> codes{new Own[N * K]};
    std::unique_ptr<float[]> steps{new float[N * K / F::GROUP]}, sums{new float[N * K / F::GROUP]};

    i64 at(i64 n, i64 k, i64 count) const { return k * N + n * count; }
    void take(const Activations &one, i64 n) {
        const float *own_steps = one.steps_of<F::GROUP>(0), *own_sums = one.sums_of<F::GROUP>(0);
        for (i64 k = 0; k < K; k += COLUMNS_OF<F>) {
            i64 count = std::min(COLUMNS_OF<F>, K - k), to = at(n, k, count);
            for (i64 i = 0; i < count; i++) codes[to + i] = Own(one.codes[k + i]);
            for (i64 i = 0; i < count / F::GROUP; i++) {
                steps[to / F::GROUP + i] = own_steps[k / F::GROUP + i], sums[to / F::GROUP + i] = own_sums[k / F::GROUP + i];
            }
        }
    }
};

template <class F> struct Panel {
    using D = Dot<F>;
    using Code = typename D::Code;
    // A code that is signed becomes unsigned where bytes are asked for.
    static constexpr int SHIFT = F::SIGNED && std::is_same_v<Code, uint8_t> ? 128 : 0;
    static constexpr i64 COLUMNS = COLUMNS_OF<F>;
    static constexpr i64 GROUPS = COLUMNS / F::GROUP;
    alignas(64) Code codes[COLUMNS / D::NEIGHBOURS][PANELS][LANES][D::NEIGHBOURS];
    alignas(64) float steps[GROUPS][PANELS][LANES], lows[GROUPS][PANELS][LANES];

    // Of `rows` rows of `bytes` each, numbers [k, k + count). Rows that are missing become the last one again.
    void unpack(const uint8_t *w, i64 bytes, i64 rows, i64 k, i64 count) {
        constexpr int slices = F::BLOCK / SLICE, groups = F::BLOCK / F::GROUP;
        typedef Code slice_of __attribute__((vector_size(SLICE * sizeof(Code))));
        typedef std::conditional_t<F::SIGNED && !SHIFT, codes_i8, codes_u8> Codes;
        for (i64 r = 0; r < ROWS; r += 8) {
            const uint8_t *b[8];
            for (int i = 0; i < 8; i++) b[i] = w + std::min(r + i, rows - 1) * bytes + k / F::BLOCK * F::BYTES;
            for (i64 at = 0; at < count; at += F::BLOCK) {
                for (int i = 0; i < 8; i++) {
                    float step[groups], low[groups];
                    F::steps(b[i], step, low);
                    for (int g = 0; g < groups; g++) {
                        steps[at / F::GROUP + g][(r + i) / LANES][(r + i) % LANES] = step[g];
                        lows[at / F::GROUP + g][(r + i) / LANES][(r + i) % LANES] = low[g] - SHIFT * step[g];
                    }
                }
                for (int slice = 0; slice < slices; slice++) {
                    slice_of own[8];
                    for (int i = 0; i < 8; i++) own[i] = __builtin_convertvector((Codes)(F::codes(b[i], slice) ^ uint8_t(SHIFT)), slice_of);
                    for (int part = 0; part < int(sizeof(Code)); part++) { // of 8 times as many neighbours as a lane has
                        eight_i32 lanes_of[8];
                        for (int i = 0; i < 8; i++) lanes_of[i] = ::at<eight_i32>((const char *)&own[i] + 32 * part);
                        transpose(lanes_of);
                        i64 first = (at + slice * SLICE) / D::NEIGHBOURS + 8 * part;
                        for (int j = 0; j < 8; j++) memcpy((char *)codes[first + j] + 4 * r, &lanes_of[j], 32);
                    }
                }
                for (int i = 0; i < 8; i++) b[i] += F::BYTES;
            }
        }
    }

    // `to [M, ROWS]` gains the products with rows [n, n + M) of activations from number k on.
    template <int M> void multiply(const Blocked<F> &x, i64 n, i64 k, i64 count, float *to) const {
        constexpr int turns = F::GROUP / D::NEIGHBOURS, adds = std::min(turns, D::template ADDS<F>);
        static_assert(turns % adds == 0);
        const float *own_steps[M], *own_sums[M];
        const typename D::Own *rows[M];
        UNROLL for (int m = 0; m < M; m++) {
            i64 at = x.at(n + m, k, count);
            rows[m] = x.codes.get() + at, own_steps[m] = x.steps.get() + at / F::GROUP, own_sums[m] = x.sums.get() + at / F::GROUP;
        }
        for (i64 g = 0; g < count / F::GROUP; g++) {
            decltype(D::total(typename D::Sum())) all[PANELS][M] = {};
            UNROLL for (int t = 0; t < turns / adds; t++) {
                typename D::Sum sum[PANELS][M] = {};
                UNROLL for (int i = 0; i < adds; i++) {
                    wide_i8 line[PANELS];
                    i64 at = g * turns + t * adds + i;
                    UNROLL for (int p = 0; p < PANELS; p++) line[p] = settled(::at<wide_i8>(codes[at][p]));
                    UNROLL for (int m = 0; m < M; m++) {
                        int32_t few; // neighbours
                        memcpy(&few, rows[m] + at * D::NEIGHBOURS, 4);
                        wide_i32 same = few - wide_i32{};
                        UNROLL for (int p = 0; p < PANELS; p++) sum[p][m] = D::gain(sum[p][m], line[p], same);
                    }
                }
                UNROLL for (int p = 0; p < PANELS; p++)
                    UNROLL for (int m = 0; m < M; m++) all[p][m] = t ? all[p][m] + D::total(sum[p][m]) : D::total(sum[p][m]);
            }
            UNROLL for (int m = 0; m < M; m++) {
                wide_f32 step = own_steps[m][g] - wide_f32{}, weight = own_sums[m][g] - wide_f32{};
                UNROLL for (int p = 0; p < PANELS; p++) {
                    float *out = to + m * ROWS + p * LANES;
                    wide_f32 sum = added(load(out), floats(all[p][m]), load(steps[g][p]) * step);
                    if constexpr (!F::SIGNED || SHIFT) sum = added(sum, load(lows[g][p]), weight);
                    keep<float>(out, sum);
                }
            }
        }
    }
};

// ---- a product -------------------------------------------------------------------------------------------------------------

struct Product {
    using F = FORMAT;
    const uint8_t *w;
    const void *x, *bias;
    void *y;
    i64 N, K, rows, type;

    // act(a null pointer to the type of x, bias and y).
    template <class A> void typed(A act) { type == 16 ? act((bf16 *)nullptr) : act((float *)nullptr); }

    void take(i64 n, Activations &own, i64 row) {
        typed([&](auto *of) { own.take((decltype(of))x + n * K, row); });
    }
    void give(const float *from, i64 stride, i64 first, i64 count) {
        typed([&](auto *of) {
            auto *own_bias = (decltype(of))bias, *to = (decltype(of))y;
            for (i64 n = 0; n < N; n++)
                for (i64 r = 0; r < count; r++)
                    store(to[n * rows + first + r], from[n * stride + r] + (bias ? number(own_bias[first + r]) : 0));
        });
    }

    void few(int threads) {
        Activations own;
        own.resize(N, K);
        for (i64 n = 0; n < N; n++) take(n, own, n);
#pragma omp parallel num_threads(threads)
        {
            i64 part = omp_get_thread_num(), parts = omp_get_num_threads();
            i64 first = rows * part / parts, count = rows * (part + 1) / parts - first;
            std::vector<float> room(N * count);
            rows_of<F>(w + first * row_bytes<F>(K), nullptr, 32, 0, count, own, N, room.data(), count, false);
            give(room.data(), count, first, count);
        }
    }

    void many(int threads) {
        Blocked<F> own{N, K};
#pragma omp parallel num_threads(threads)
        {
            Activations one;
            one.resize(1, K);
#pragma omp for schedule(static)
            for (i64 n = 0; n < N; n++) take(n, one, 0), own.take(one, n);
            auto panel = std::make_unique<Panel<F>>();
            std::vector<float> room;
#pragma omp for schedule(dynamic)
            for (i64 first = 0; first < rows; first += ROWS) {
                i64 count = std::min<i64>(ROWS, rows - first), bytes = row_bytes<F>(K);
                room.assign(N * ROWS, 0.0f);
                for (i64 k = 0; k < K; k += panel->COLUMNS) {
                    i64 some = std::min<i64>(panel->COLUMNS, K - k), n = 0;
                    panel->unpack(w + first * bytes, bytes, count, k, some);
                    for (; n + TOKENS <= N; n += TOKENS) panel->multiply<TOKENS>(own, n, k, some, room.data() + n * ROWS);
                    for (; n < N; n++) panel->multiply<1>(own, n, k, some, room.data() + n * ROWS);
                }
                give(room.data(), ROWS, first, count);
            }
        }
    }

    void run(int threads) {
        if (N * K * rows < ONE_THREAD) threads = 1;
        N < MANY ? few(threads) : many(threads);
    }
};

} // namespace

// x [N, K] times a matrix [rows, K], transposed, plus a bias or null: y [N, rows]. `type` of x, bias and y as `TYPES`.
extern "C" void locret_product(
    const void *x, const void *w, const void *bias, i64 N, i64 K, i64 rows, void *y, int type, int threads) {
    Product{(const uint8_t *)w, x, bias, y, N, K, rows, type}.run(threads);
}
// `rows` and `unpack` of a `Format` (`layout.h`).
extern "C" void locret_rows(
    const void *w, const void *bias, i64 type, i64 first, i64 end, const void *x, i64 N, float *y, i64 stride, int add) {
    rows_of<FORMAT>((const uint8_t *)w, bias, type, first, end, *(const Activations *)x, N, y, stride, add);
}
extern "C" void locret_unpack(const void *w, i64 K, float *out) { unpack_row<FORMAT>((const uint8_t *)w, K, out); }
