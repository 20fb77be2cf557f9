/* What is slow on a CPU as a series of whole-tensor operations: products with a compressed layer for one decoding step
 * (unpack into registers, multiply, forget), and the nearest entry of a codebook.
 *
 * A layer's stream is a list of pieces: exact numbers, codebook codes or uniform codes, each of some tokens in order.
 * Strides are in entries. A number's place in a packed block is its lane; queries and sums are kept in the order of
 * lanes, so that nothing is reordered per token. Written with the vector types of gcc and clang.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 64, LANES = 2048, CHANNELS = 256, HEADS = 8, TOKENS = 16 };
enum { EXACT, CODEBOOK, UNIFORM };
enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    int32_t kind, dtype;                   /* dtype: of exact numbers, or of scale and zero */
    int64_t first, tokens;                 /* tokens [first, first + tokens) */
    const void *data;                      /* numbers [B][H][T][D], codes [B][H][blocks][columns], [B][H][T][words] */
    int64_t stride_b, stride_h, stride_t;  /* over batch, head, and token or block */
    const void *scale, *zero;              /* uniform: [B][H][T / group][D] for keys, [B][H][T][D / group] for values */
    int64_t side_b, side_h, side_t;
} Piece;

typedef struct {
    int32_t tokens, channels, columns; /* codebook: an entry covers tokens x channels, a block has `columns` codes */
    int32_t bits, words, group;        /* uniform */
    const float *table;                /* [all entries][tokens x channels] */
    const int32_t *book;               /* [H][columns]: first entry of the column's codebook */
    const float *std, *mean;           /* [H][D] */
    const int32_t *lane_channel;       /* [lanes] */
} Codec;

typedef struct {
    int32_t pairs, interleaved; /* channels turned together: k and k + pairs, or 2 k and 2 k + 1; no RoPE: pairs 0 */
    int64_t offset;             /* position of token 0 */
    const float *frequency;     /* [pairs] */
    const float *cos, *sin;     /* [TURNS][pairs], by token, times the scale */
    const float *lane_cos, *lane_sin; /* [TURNS][lane pairs], by block: lane k turns with lane k + lane_pairs */
    int32_t lane_pairs;
} Turn;

typedef struct {
    int32_t rows, first_row, heads, group, dim; /* rows of the batch from first_row on; group: query heads per head */
} Shape;

/* -- numbers in 16 bits ------------------------------------------------------------------------ */

static inline float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

static void widen(int n, int dtype, const void *from, int64_t at, float *restrict x) {
    if (dtype == FLOAT32) {
        memcpy(x, (const float *)from + at, n * sizeof(float));
    } else if (dtype == BFLOAT16) {
        for (int i = 0; i < n; i++) x[i] = from_bfloat16(((const uint16_t *)from)[at + i]);
    } else {
        for (int i = 0; i < n; i++) x[i] = (float)((const _Float16 *)from)[at + i];
    }
}

/* -- sums -------------------------------------------------------------------------------------- */

static float dot(int n, const float *restrict x, const float *restrict y) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static void add(int n, float w, const float *restrict x, float *restrict sum) {
    for (int i = 0; i < n; i++) sum[i] += w * x[i];
}

/* -- RoPE: R(-s - i) q = R(-i) R(-s) q; the start s is exact, i counts on from it in a table --- */

/* out = R(-p) q by the cos and sin of p: pairs k and k + pairs, or 2 k and 2 k + 1. */
static void turn(int n, int pairs, int interleaved, const float *restrict q, const float *restrict cos,
                 const float *restrict sin, float *restrict out) {
    for (int k = 2 * pairs; k < n; k++) out[k] = q[k];
    if (interleaved) {
        for (int k = 0; k < pairs; k++) out[2 * k] = q[2 * k] * cos[k] + q[2 * k + 1] * sin[k];
        for (int k = 0; k < pairs; k++) out[2 * k + 1] = q[2 * k + 1] * cos[k] - q[2 * k] * sin[k];
    } else {
        for (int k = 0; k < pairs; k++) out[k] = q[k] * cos[k] + q[k + pairs] * sin[k];
        for (int k = 0; k < pairs; k++) out[k + pairs] = q[k + pairs] * cos[k] - q[k] * sin[k];
    }
}

/* base[g] = R(-start) q[g] for the query heads of one kv head. */
static void turn_back(const Shape *shape, const Turn *to, int64_t start, const float *q, float base[][CHANNELS]) {
    float cos[CHANNELS / 2], sin[CHANNELS / 2];
    for (int k = 0; k < to->pairs; k++) {
        float angle = (float)(start + to->offset) * to->frequency[k];
        cos[k] = cosf(angle), sin[k] = sinf(angle);
    }
    for (int g = 0; g < shape->group; g++)
        turn(shape->dim, to->pairs, to->interleaved, q + g * shape->dim, cos, sin, base[g]);
}

/* -- exact numbers ----------------------------------------------------------------------------- */

static void exact_scores(const Shape *shape, const Piece *piece, const Turn *to, int64_t at, const float *q, float *out,
                         int64_t stride) {
    int D = shape->dim;
    float x[CHANNELS], base[HEADS][CHANNELS], turned[CHANNELS];
    for (int t = 0; t < piece->tokens; t++) {
        if (to->pairs && t % TURNS == 0) turn_back(shape, to, piece->first + t, q, base);
        widen(D, piece->dtype, piece->data, at + t * piece->stride_t, x);
        for (int g = 0; g < shape->group; g++) {
            const float *own = q + g * D;
            if (to->pairs) {
                int64_t row = (int64_t)(t % TURNS) * to->pairs;
                turn(D, to->pairs, to->interleaved, base[g], to->cos + row, to->sin + row, turned);
                own = turned;
            }
            out[g * stride + piece->first + t] = dot(D, own, x);
        }
    }
}

static void exact_sum(const Shape *shape, const Piece *piece, int64_t at, const float *weights, int64_t stride,
                      float *out) {
    float x[CHANNELS];
    for (int t = 0; t < piece->tokens; t++) {
        widen(shape->dim, piece->dtype, piece->data, at + t * piece->stride_t, x);
        for (int g = 0; g < shape->group; g++)
            add(shape->dim, weights[g * stride + piece->first + t], x, out + g * shape->dim);
    }
}

/* -- codebooks: an entry has SIZE = tokens x channels numbers; lanes [column][number of the entry] -- */

#define CODEBOOK_OF(SIZE)                                                                                             \
    typedef float vec_##SIZE __attribute__((vector_size(4 * SIZE)));                                                  \
    static inline vec_##SIZE load_##SIZE(const float *from) {                                                         \
        vec_##SIZE x;                                                                                                 \
        memcpy(&x, from, sizeof x);                                                                                   \
        return x;                                                                                                     \
    }                                                                                                                 \
    /* sums[h][s] = sum over columns m of x[h][m][s] (std[m][s] entry_m[s] + mean[m][s]), for two queries, x and y. */\
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
CODEBOOK_OF(2)
CODEBOOK_OF(4)
CODEBOOK_OF(8)

#define BY_SIZE(size, name, ...)                                                                                      \
    do {                                                                                                              \
        if (size == 2) name##_2(__VA_ARGS__);                                                                         \
        if (size == 4) name##_4(__VA_ARGS__);                                                                         \
        if (size == 8) name##_8(__VA_ARGS__);                                                                         \
    } while (0)

static void to_lanes(int lanes, const int32_t *restrict channel, const float *restrict x, float *restrict out) {
    for (int i = 0; i < lanes; i++) out[i] = x[channel[i]];
}

static void codebook_scores(const Shape *shape, const Piece *piece, const Codec *codec, const Turn *to, int head,
                            int64_t at, const float *q, float *out, int64_t stride) {
    int size = codec->tokens * codec->channels, lanes = codec->columns * size;
    float base[HEADS][CHANNELS], sums[2 * 8];
    static _Thread_local float own[HEADS][LANES], turned[2][LANES], std[LANES], mean[LANES];
    to_lanes(lanes, codec->lane_channel, codec->std + head * shape->dim, std);
    to_lanes(lanes, codec->lane_channel, codec->mean + head * shape->dim, mean);
    for (int g = 0; g < shape->group; g++) to_lanes(lanes, codec->lane_channel, q + g * shape->dim, own[g]);
    for (int n = 0; n < piece->tokens / codec->tokens; n++) {
        if (to->pairs && n % TURNS == 0) {
            turn_back(shape, to, piece->first + (int64_t)n * codec->tokens, q, base);
            for (int g = 0; g < shape->group; g++) to_lanes(lanes, codec->lane_channel, base[g], own[g]);
        }
        const uint8_t *codes = (const uint8_t *)piece->data + at + n * piece->stride_t;
        for (int g = 0; g < shape->group; g += 2) {
            int both = g + 1 < shape->group ? 2 : 1;
            const float *x = own[g], *y = own[g + both - 1];
            if (to->pairs) {
                int64_t row = (int64_t)(n % TURNS) * to->lane_pairs;
                for (int i = 0; i < both; i++)
                    turn(lanes, to->lane_pairs, 0, own[g + i], to->lane_cos + row, to->lane_sin + row, turned[i]);
                x = turned[0], y = turned[both - 1];
            }
            const int32_t *book = codec->book + head * codec->columns;
            BY_SIZE(size, dot, codec->columns, codes, book, codec->table, std, mean, x, y, sums);
            for (int i = 0; i < both; i++) {
                float *score = out + (g + i) * stride + piece->first + (int64_t)n * codec->tokens;
                for (int j = 0; j < codec->tokens; j++) {
                    score[j] = 0;
                    for (int c = 0; c < codec->channels; c++) score[j] += sums[i * size + j * codec->channels + c];
                }
            }
        }
    }
}

static void codebook_sum(const Shape *shape, const Piece *piece, const Codec *codec, int head, int64_t at,
                         const float *weights, int64_t stride, float *out) {
    int size = codec->tokens * codec->channels, lanes = codec->columns * size, D = shape->dim;
    float wide[2][8], total[HEADS] = {0};
    static _Thread_local float sums[HEADS + 1][LANES];
    memset(sums, 0, sizeof sums);
    for (int n = 0; n < piece->tokens / codec->tokens; n++) {
        const uint8_t *codes = (const uint8_t *)piece->data + at + n * piece->stride_t;
        for (int g = 0; g < shape->group; g += 2) {
            int both = g + 1 < shape->group ? 2 : 1;
            for (int i = 0; i < both; i++) {
                const float *w = weights + (g + i) * stride + piece->first + (int64_t)n * codec->tokens;
                for (int s = 0; s < size; s++) wide[i][s] = w[s / codec->channels];
                for (int j = 0; j < codec->tokens; j++) total[g + i] += w[j];
            }
            float *x = sums[g], *y = both == 2 ? sums[g + 1] : sums[HEADS];
            const int32_t *book = codec->book + head * codec->columns;
            BY_SIZE(size, add, codec->columns, codes, book, codec->table, wide[0], wide[both - 1], x, y);
        }
    }
    for (int g = 0; g < shape->group; g++) {
        for (int i = 0; i < lanes; i++) {
            int d = codec->lane_channel[i];
            out[g * D + d] += codec->std[head * D + d] * sums[g][i];
        }
        add(D, total[g], codec->mean + head * D, out + g * D);
    }
}

/* -- uniform codes in planar 32-bit words: channel c is in word c % words, plane c / words ----- */

typedef float tokens_f __attribute__((vector_size(4 * TOKENS)));
typedef uint32_t tokens_u __attribute__((vector_size(4 * TOKENS)));
typedef int32_t tokens_i __attribute__((vector_size(4 * TOKENS)));

static inline tokens_u words_of(const int32_t *from, int64_t stride, int count) {
    tokens_u x = {0};
    for (int i = 0; i < count; i++) x[i] = (uint32_t)from[i * stride];
    return x;
}

static inline tokens_f codes_of(tokens_u planes, int bits) {
    return __builtin_convertvector((tokens_i)(planes & ((1u << bits) - 1)), tokens_f);
}

/* Keys in groups of tokens of a channel: q . (scale code + zero) = (q scale) . code + q . zero, TOKENS at a time. */
static void uniform_scores(const Shape *shape, const Piece *piece, const Codec *codec, int64_t at, int64_t side,
                           const float *q, float *out, int64_t stride) {
    int D = shape->dim, G = shape->group, group = codec->group;
    float scale[CHANNELS], zero[CHANNELS], folded[CHANNELS][HEADS], offset[HEADS];
    for (int n = 0; n < piece->tokens / group; n++) {
        widen(D, piece->dtype, piece->scale, side + n * piece->side_t, scale);
        widen(D, piece->dtype, piece->zero, side + n * piece->side_t, zero);
        for (int g = 0; g < G; g++) {
            offset[g] = dot(D, q + g * D, zero);
            for (int d = 0; d < D; d++) folded[d][g] = q[g * D + d] * scale[d];
        }
        for (int t = n * group; t < (n + 1) * group; t += TOKENS) {
            int count = (n + 1) * group - t < TOKENS ? (n + 1) * group - t : TOKENS;
            const int32_t *from = (const int32_t *)piece->data + at + t * piece->stride_t;
            tokens_f sums[HEADS] = {0};
            for (int w = 0; w < codec->words; w++) {
                tokens_u planes = words_of(from + w, piece->stride_t, count);
                for (int d = w; d < D; d += codec->words, planes >>= codec->bits) {
                    tokens_f x = codes_of(planes, codec->bits);
                    for (int g = 0; g < G; g++) sums[g] += x * folded[d][g];
                }
            }
            for (int g = 0; g < G; g++)
                for (int i = 0; i < count; i++) out[g * stride + piece->first + t + i] = sums[g][i] + offset[g];
        }
    }
}

/* Values in groups of channels of a token. */
static void uniform_sum(const Shape *shape, const Piece *piece, const Codec *codec, int64_t at, int64_t side,
                        const float *weights, int64_t stride, float *out) {
    int D = shape->dim, G = shape->group, groups = D / codec->group;
    float scale[CHANNELS], zero[CHANNELS];
    tokens_f parts[CHANNELS][HEADS], scales[CHANNELS], zeros[CHANNELS];
    for (int d = 0; d < D; d++)
        for (int g = 0; g < G; g++) parts[d][g] = (tokens_f){0};
    for (int t = 0; t < piece->tokens; t += TOKENS) {
        int count = piece->tokens - t < TOKENS ? piece->tokens - t : TOKENS;
        tokens_f w[HEADS] = {0};
        for (int g = 0; g < G; g++) memcpy(&w[g], weights + g * stride + piece->first + t, count * sizeof(float));
        for (int i = 0; i < TOKENS; i++) {
            int own = i < count ? t + i : t; /* lanes without a token have weight 0 */
            widen(groups, piece->dtype, piece->scale, side + own * piece->side_t, scale);
            widen(groups, piece->dtype, piece->zero, side + own * piece->side_t, zero);
            for (int k = 0; k < groups; k++) scales[k][i] = scale[k], zeros[k][i] = zero[k];
        }
        const int32_t *from = (const int32_t *)piece->data + at + t * piece->stride_t;
        for (int word = 0; word < codec->words; word++) {
            tokens_u planes = words_of(from + word, piece->stride_t, count);
            for (int d = word; d < D; d += codec->words, planes >>= codec->bits) {
                tokens_f x = codes_of(planes, codec->bits) * scales[d / codec->group] + zeros[d / codec->group];
                for (int g = 0; g < G; g++) parts[d][g] += w[g] * x;
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int d = 0; d < D; d++)
            for (int i = 0; i < TOKENS; i++) out[g * D + d] += parts[d][g][i];
}

/* -- a stream ---------------------------------------------------------------------------------- */

/* Where a row's head begins in a piece's data, and in its scales. */
static int64_t at_data(const Shape *shape, const Piece *piece, int row, int head) {
    return (shape->first_row + row) * piece->stride_b + head * piece->stride_h;
}

static int64_t at_side(const Shape *shape, const Piece *piece, int row, int head) {
    return (shape->first_row + row) * piece->side_b + head * piece->side_h;
}

/* out[row][head][g][token] = q[row][head][g] . key, for heads [from, to) and all tokens of all pieces; out has `stride`
 * numbers per query head. At most HEADS query heads per kv head and CHANNELS channels; uniform codes without RoPE. */
void key_scores(const Shape *shape, int from, int to, int count, const Piece *pieces, const Codec *codec,
                const Turn *turn, const float *q, float *out, int64_t stride) {
    for (int row = 0; row < shape->rows; row++)
        for (int head = from; head < to; head++) {
            int64_t block = ((int64_t)row * shape->heads + head) * shape->group;
            const float *own = q + block * shape->dim;
            float *scores = out + block * stride;
            for (const Piece *piece = pieces; piece < pieces + count; piece++) {
                int64_t at = at_data(shape, piece, row, head), side = at_side(shape, piece, row, head);
                if (piece->kind == EXACT) exact_scores(shape, piece, turn, at, own, scores, stride);
                if (piece->kind == CODEBOOK)
                    codebook_scores(shape, piece, codec, turn, head, at, own, scores, stride);
                if (piece->kind == UNIFORM) uniform_scores(shape, piece, codec, at, side, own, scores, stride);
            }
        }
}

/* out[row][head][g] = sum over tokens of weights[row][head][g][token] value; `stride` weights per query head. */
void value_sums(const Shape *shape, int from, int to, int count, const Piece *pieces, const Codec *codec,
                const float *weights, int64_t stride, float *out) {
    for (int row = 0; row < shape->rows; row++)
        for (int head = from; head < to; head++) {
            int64_t block = ((int64_t)row * shape->heads + head) * shape->group;
            const float *w = weights + block * stride;
            float *sums = out + block * shape->dim;
            memset(sums, 0, shape->group * shape->dim * sizeof(float));
            for (const Piece *piece = pieces; piece < pieces + count; piece++) {
                int64_t at = at_data(shape, piece, row, head), side = at_side(shape, piece, row, head);
                if (piece->kind == EXACT) exact_sum(shape, piece, at, w, stride, sums);
                if (piece->kind == CODEBOOK) codebook_sum(shape, piece, codec, head, at, w, stride, sums);
                if (piece->kind == UNIFORM) uniform_sum(shape, piece, codec, at, side, w, stride, sums);
            }
        }
}

/* -- the nearest entry of a codebook ----------------------------------------------------------- */

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
