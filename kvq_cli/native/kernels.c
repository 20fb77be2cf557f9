/* DECISION OF THE LEAD (09:22): no C code in kvq; see library.py. Remove this room, keep the plain-PyTorch path, commit by 09:35, report. */
/* What is slow on a CPU as a series of whole-tensor operations: products with packed numbers for one decoding step
 * (unpack into registers, multiply, forget), and the nearest entry of a codebook.
 *
 * B batch, H kv heads, G query heads per kv head, D channels, T tokens. Arrays are contiguous except packed ones, whose
 * strides over batch, head and block are given in entries, and rows of out and weights, `stride` apart.
 * A number's place in a packed block is its lane; queries and sums are kept in the order of lanes, so that nothing is
 * reordered per token. Written with the vector types of gcc and clang.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { TURNS = 64, LANES = 2048, CHANNELS = 256, HEADS = 8, TOKENS = 16 };

/* -- codebooks: an entry has SIZE = tokens x channels numbers; lanes [column][number of the entry] ----------------- */

/* out = R q: lane k turns with lane k + pairs. */
static void turn(int lanes, int pairs, const float *restrict q, const float *restrict cos, const float *restrict sin,
                 float *restrict out) {
    for (int k = 0; k < pairs; k++) out[k] = q[k] * cos[k] + q[k + pairs] * sin[k];
    for (int k = 0; k < pairs; k++) out[k + pairs] = q[k + pairs] * cos[k] - q[k] * sin[k];
    for (int k = 2 * pairs; k < lanes; k++) out[k] = q[k];
}

#define CODEBOOK(SIZE)                                                                                                \
    typedef float vec_##SIZE __attribute__((vector_size(4 * SIZE)));                                                  \
    static inline vec_##SIZE load_##SIZE(const float *from) {                                                         \
        vec_##SIZE x;                                                                                                 \
        memcpy(&x, from, sizeof x);                                                                                   \
        return x;                                                                                                     \
    }                                                                                                                 \
    /* sums[h][s] = sum over columns m of x[h][m][s] (std entry_m[s] + mean), for two queries, x and y. */            \
    static void dot_##SIZE(int columns, const uint8_t *restrict codes, const int32_t *restrict book,                  \
                           const float *restrict table, const float *restrict std, const float *restrict mean,        \
                           const float *restrict x, const float *restrict y, float *restrict sums) {                  \
        vec_##SIZE even_x = {0}, odd_x = {0}, even_y = {0}, odd_y = {0};                                              \
        for (int m = 0; m < columns; m += 2) {                                                                        \
            int lane = m * SIZE, next = lane + SIZE;                                                                  \
            vec_##SIZE even = load_##SIZE(table + (int64_t)(book[m] + codes[m]) * SIZE);                              \
            vec_##SIZE odd = load_##SIZE(table + (int64_t)(book[m + 1] + codes[m + 1]) * SIZE);                       \
            even = even * load_##SIZE(std + lane) + load_##SIZE(mean + lane);                                         \
            odd = odd * load_##SIZE(std + next) + load_##SIZE(mean + next);                                           \
            even_x += even * load_##SIZE(x + lane);                                                                   \
            odd_x += odd * load_##SIZE(x + next);                                                                     \
            even_y += even * load_##SIZE(y + lane);                                                                   \
            odd_y += odd * load_##SIZE(y + next);                                                                     \
        }                                                                                                             \
        even_x += odd_x;                                                                                              \
        even_y += odd_y;                                                                                              \
        memcpy(sums, &even_x, sizeof even_x);                                                                         \
        memcpy(sums + SIZE, &even_y, sizeof even_y);                                                                  \
    }                                                                                                                 \
    /* x[m][s] += v[s] entry_m[s] and y[m][s] += w[s] entry_m[s]. */                                                  \
    static void add_##SIZE(int columns, const uint8_t *restrict codes, const int32_t *restrict book,                  \
                           const float *restrict table, const float *restrict v, const float *restrict w,             \
                           float *restrict x, float *restrict y) {                                                    \
        vec_##SIZE vs = load_##SIZE(v), ws = load_##SIZE(w);                                                          \
        for (int m = 0; m < columns; m++) {                                                                           \
            vec_##SIZE entry = load_##SIZE(table + (int64_t)(book[m] + codes[m]) * SIZE);                             \
            vec_##SIZE xs = load_##SIZE(x + m * SIZE) + vs * entry, ys = load_##SIZE(y + m * SIZE) + ws * entry;      \
            memcpy(x + m * SIZE, &xs, sizeof xs);                                                                     \
            memcpy(y + m * SIZE, &ys, sizeof ys);                                                                     \
        }                                                                                                             \
    }
CODEBOOK(2)
CODEBOOK(4)
CODEBOOK(8)

#define BY_SIZE(size, name, ...)                                                                                      \
    do {                                                                                                              \
        if (size == 2) name##_2(__VA_ARGS__);                                                                         \
        if (size == 4) name##_4(__VA_ARGS__);                                                                         \
        if (size == 8) name##_8(__VA_ARGS__);                                                                         \
    } while (0)

/* out[b][h][g][n tokens + j] = R q . (std entry + mean) of token j of block n.
 * codes [B][H][N][columns], table [entries][size], book [H][columns]: first entry of a column's codebook, std and mean
 * [H][lanes]. q [ceil(N / TURNS)][B][H][G][lanes]: R(-s) q of the position s of every TURNS-th block; cos, sin
 * [TURNS][pairs] turn it on from there. Without RoPE pairs is 0 and q has one start. columns and G even, or G 1. */
void codebook_scores(int B, int H, int from_head, int to_head, int G, int N, int columns, int tokens, int channels, const uint8_t *codes,
                     int64_t stride_b, int64_t stride_h, int64_t stride_n, const float *table, const int32_t *book,
                     const float *std, const float *mean, const float *q, int pairs, const float *cos, const float *sin,
                     float *out, int64_t stride) {
    int size = tokens * channels, lanes = columns * size;
    float turned[2][LANES], sums[2 * 8];
    for (int b = 0; b < B; b++)
        for (int h = from_head; h < to_head; h++)
            for (int n = 0; n < N; n++)
                for (int g = 0; g < G; g += 2) {
                    int both = g + 1 < G ? 2 : 1, step = n % TURNS;
                    const float *own = q + ((((int64_t)(pairs ? n / TURNS : 0) * B + b) * H + h) * G + g) * lanes;
                    const float *x = own, *y = own + (both - 1) * lanes;
                    if (pairs) {
                        for (int i = 0; i < both; i++)
                            turn(lanes, pairs, own + i * lanes, cos + step * pairs, sin + step * pairs, turned[i]);
                        x = turned[0], y = turned[both - 1];
                    }
                    const uint8_t *block = codes + b * stride_b + h * stride_h + n * stride_n;
                    BY_SIZE(size, dot, columns, block, book + h * columns, table, std + h * lanes, mean + h * lanes, x, y,
                            sums);
                    for (int i = 0; i < both; i++) {
                        float *to = out + ((b * H + h) * (int64_t)G + g + i) * stride + (int64_t)n * tokens;
                        for (int j = 0; j < tokens; j++) {
                            to[j] = 0;
                            for (int c = 0; c < channels; c++) to[j] += sums[i * size + j * channels + c];
                        }
                    }
                }
}

/* sums[b][h][g][lane] += weights[b][h][g][n tokens + the lane's token] entry of the lane in block n. */
void codebook_sums(int B, int H, int from_head, int to_head, int G, int N, int columns, int tokens, int channels, const uint8_t *codes,
                   int64_t stride_b, int64_t stride_h, int64_t stride_n, const float *table, const int32_t *book,
                   const float *weights, int64_t stride, float *sums) {
    int size = tokens * channels, lanes = columns * size;
    float wide[2][8], spare[LANES];
    for (int b = 0; b < B; b++)
        for (int h = from_head; h < to_head; h++)
            for (int n = 0; n < N; n++)
                for (int g = 0; g < G; g += 2) {
                    int64_t row = (b * H + h) * (int64_t)G + g;
                    int both = g + 1 < G ? 2 : 1;
                    for (int i = 0; i < both; i++)
                        for (int s = 0; s < size; s++)
                            wide[i][s] = weights[(row + i) * stride + (int64_t)n * tokens + s / channels];
                    float *x = sums + row * lanes, *y = both == 2 ? x + lanes : spare;
                    const uint8_t *block = codes + b * stride_b + h * stride_h + n * stride_n;
                    BY_SIZE(size, add, columns, block, book + h * columns, table, wide[0], wide[both - 1], x, y);
                }
}

/* -- uniform codes in planar 32-bit words: channel c is in word c % words, plane c / words -------------------------- */

typedef float tokens_f __attribute__((vector_size(4 * TOKENS)));
typedef uint32_t tokens_u __attribute__((vector_size(4 * TOKENS)));
typedef int32_t tokens_i __attribute__((vector_size(4 * TOKENS)));

/* out[b][h][g][t] = q . (scale code + zero): groups of `group` tokens of a channel; TOKENS tokens at a time.
 * codes [B][H][T][words], scale and zero [B][H][T / group][D], q [B][H][G][D].
 * G at most HEADS, D at most CHANNELS. */
void uniform_scores(int B, int H, int from_head, int to_head, int G, int T, int D, int bits, int words, int group, const int32_t *codes,
                    int64_t stride_b, int64_t stride_h, int64_t stride_t, const float *scale, const float *zero,
                    const float *q, float *out, int64_t stride) {
    int groups = T / group;
    float folded[CHANNELS][HEADS];
    for (int b = 0; b < B; b++)
        for (int h = from_head; h < to_head; h++)
            for (int n = 0; n < groups; n++) {
                const float *s = scale + ((int64_t)(b * H + h) * groups + n) * D, *z = s - scale + zero;
                float offset[HEADS] = {0};
                for (int g = 0; g < G; g++)
                    for (int d = 0; d < D; d++) {
                        float x = q[((b * H + h) * G + g) * D + d];
                        folded[d][g] = x * s[d];
                        offset[g] += x * z[d];
                    }
                for (int t = n * group; t < (n + 1) * group; t += TOKENS) {
                    int count = (n + 1) * group - t < TOKENS ? (n + 1) * group - t : TOKENS;
                    const int32_t *from = codes + b * stride_b + h * stride_h + t * stride_t;
                    tokens_f sums[HEADS] = {0};
                    for (int w = 0; w < words; w++) {
                        tokens_u word = {0};
                        for (int i = 0; i < count; i++) word[i] = (uint32_t)from[i * stride_t + w];
                        for (int d = w; d < D; d += words, word >>= bits) {
                            tokens_f x = __builtin_convertvector((tokens_i)(word & ((1u << bits) - 1)), tokens_f);
                            for (int g = 0; g < G; g++) sums[g] += x * folded[d][g];
                        }
                    }
                    for (int g = 0; g < G; g++)
                        for (int i = 0; i < count; i++)
                            out[((b * H + h) * (int64_t)G + g) * stride + t + i] = sums[g][i] + offset[g];
                }
            }
}

/* sums[b][h][g][c] += sum over t of weights[b][h][g][t] (scale code + zero): groups of `group` channels of a token.
 * codes [B][H][T][words], scale and zero [B][H][T][D / group]. G at most HEADS, D at most CHANNELS. */
void uniform_sums(int B, int H, int from_head, int to_head, int G, int T, int D, int bits, int words, int group, const int32_t *codes,
                  int64_t stride_b, int64_t stride_h, int64_t stride_t, const float *scale, const float *zero,
                  const float *weights, int64_t stride, float *sums) {
    int groups = D / group;
    tokens_f parts[CHANNELS][HEADS], scales[CHANNELS], zeros[CHANNELS];
    for (int b = 0; b < B; b++)
        for (int h = from_head; h < to_head; h++) {
            for (int d = 0; d < D; d++)
                for (int g = 0; g < G; g++) parts[d][g] = (tokens_f){0};
            for (int t = 0; t < T; t += TOKENS) {
                int count = T - t < TOKENS ? T - t : TOKENS;
                int64_t row = ((int64_t)(b * H + h) * T + t) * groups;
                tokens_f w[HEADS] = {0};
                for (int g = 0; g < G; g++)
                    memcpy(&w[g], weights + ((b * H + h) * (int64_t)G + g) * stride + t, count * sizeof(float));
                for (int k = 0; k < groups; k++) {
                    scales[k] = zeros[k] = (tokens_f){0};
                    for (int i = 0; i < count; i++) {
                        scales[k][i] = scale[row + i * groups + k];
                        zeros[k][i] = zero[row + i * groups + k];
                    }
                }
                const int32_t *from = codes + b * stride_b + h * stride_h + t * stride_t;
                for (int word = 0; word < words; word++) {
                    tokens_u planes = {0};
                    for (int i = 0; i < count; i++) planes[i] = (uint32_t)from[i * stride_t + word];
                    for (int d = word; d < D; d += words, planes >>= bits) {
                        tokens_f x = __builtin_convertvector((tokens_i)(planes & ((1u << bits) - 1)), tokens_f);
                        x = x * scales[d / group] + zeros[d / group];
                        for (int g = 0; g < G; g++) parts[d][g] += w[g] * x;
                    }
                }
            }
            for (int g = 0; g < G; g++)
                for (int d = 0; d < D; d++)
                    for (int i = 0; i < TOKENS; i++) sums[((b * H + h) * G + g) * D + d] += parts[d][g][i];
        }
}

/* -- the nearest entry of a codebook -------------------------------------------------------------------------------- */

/* codes[book][i] = index of the entry with the least ||c||^2 - 2 u.c, the first of equally near ones: u = blocks
 * [books][count][size], whole numbers; c = the entries [books][entries][size] times the book's scale, rounded. All sums
 * are whole numbers below 2^53, hence exact in any order. entries at most 256, size at most 8. */
void nearest_entries(int from_book, int to_book, int count, int entries, int size, const float *blocks,
                     const float *centroids, const float *scale, uint8_t *codes) {
    double grid[8][256], constant[256], rank[256];
    for (int book = from_book; book < to_book; book++) {
        const float *c = centroids + (int64_t)book * entries * size;
        for (int e = 0; e < entries; e++) {
            double norm = 0;
            for (int s = 0; s < size; s++) {
                double x = rint((double)c[e * size + s] * scale[book]);
                norm += x * x;
                grid[s][e] = -512 * x;
            }
            constant[e] = 256 * norm + e; /* the index rides in the lowest byte, so that a plain minimum finds it */
        }
        for (int i = 0; i < count; i++) {
            const float *u = blocks + ((int64_t)book * count + i) * size;
            for (int e = 0; e < entries; e++) rank[e] = constant[e];
            for (int s = 0; s < size; s++)
                for (int e = 0; e < entries; e++) rank[e] += u[s] * grid[s][e];
            double least = rank[0];
            for (int e = 1; e < entries; e++) least = rank[e] < least ? rank[e] : least;
            codes[(int64_t)book * count + i] = (uint8_t)(int64_t)least;
        }
    }
}
