/* The graph callback that lets a stock llama.cpp run a slice of layers.
 *
 * llama_context_params.cb_eval is asked about every graph node by name, about a thousand times a
 * step, so it must be native code. Two names matter:
 *
 *   last      "l_out-<n>", the last layer's residual, on every stage but the last: its rows are
 *             copied out and the graph stops there, so the output head is never computed. The
 *             self-test also looks at them on the last stage: there the graph goes on.
 *   restored  a tensor that stands for the host's input rows but is not equal to them: those rows
 *             times a constant, on later stages of families that scale their input, or embeddings
 *             of token ids where llama.cpp takes no rows. The host's own rows are written over it,
 *             so that activations pass a cut bit for bit.
 *
 * Neither headers nor linking: the four ggml functions it needs are exported by libggml-base and
 * arrive as addresses. So it builds without llama.cpp and survives a new struct layout there.
 * One owner thread, one micro-batch per decode. An error cannot leave a callback, so it is kept in
 * `failed` and the owner asks for it after the decode.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define NAME_BYTES 64

enum { TAP_OK = 0, TAP_NO_MEMORY = 1, TAP_WRONG_SIZE = 2 };

typedef struct {
    const char *(*get_name)(const void *tensor);
    size_t (*num_bytes)(const void *tensor);
    void (*get)(const void *tensor, void *data, size_t offset, size_t size);
    void (*set)(void *tensor, const void *data, size_t offset, size_t size);
    char last[NAME_BYTES];
    char restored[NAME_BYTES];
    bool goes_on;
    const void *input;
    size_t input_bytes;
    char *rows;
    size_t rows_bytes;
    size_t rows_capacity;
    long num_fired;
    long num_restored;
    int failed;
} tap_t;

/* Empty names switch that half off. Returns NULL when out of memory or a name is too long. */
tap_t *tap_new(void *get_name, void *num_bytes, void *get, void *set, const char *last,
               const char *restored, bool goes_on) {
    if (strlen(last) >= NAME_BYTES || strlen(restored) >= NAME_BYTES) return NULL;
    tap_t *tap = calloc(1, sizeof *tap);
    if (!tap) return NULL;
    tap->get_name = (const char *(*)(const void *))get_name;
    tap->num_bytes = (size_t (*)(const void *))num_bytes;
    tap->get = (void (*)(const void *, void *, size_t, size_t))get;
    tap->set = (void (*)(void *, const void *, size_t, size_t))set;
    strcpy(tap->last, last);
    strcpy(tap->restored, restored);
    tap->goes_on = goes_on;
    return tap;
}

void tap_free(tap_t *tap) {
    if (tap) free(tap->rows);
    free(tap);
}

/* Call before each decode. `input` must stay alive until the decode returns. */
void tap_begin(tap_t *tap, const void *input, size_t input_bytes) {
    tap->input = input;
    tap->input_bytes = input_bytes;
    tap->rows_bytes = 0;
    tap->num_fired = 0;
    tap->num_restored = 0;
    tap->failed = TAP_OK;
}

const void *tap_rows(const tap_t *tap, size_t *num_bytes, long *num_fired, long *num_restored,
                     int *failed) {
    *num_bytes = tap->rows_bytes;
    *num_fired = tap->num_fired;
    *num_restored = tap->num_restored;
    *failed = tap->failed;
    return tap->rows;
}

static bool grow(tap_t *tap, size_t wanted) {
    if (wanted <= tap->rows_capacity) return true;
    char *rows = realloc(tap->rows, 2 * wanted);
    if (!rows) return false;
    tap->rows = rows;
    tap->rows_capacity = 2 * wanted;
    return true;
}

/* llama_context_params.cb_eval. Returning false for a computed node stops the graph. */
bool tap_eval(void *tensor, bool ask, void *user_data) {
    tap_t *tap = user_data;
    const char *name = tap->get_name(tensor);
    bool is_last = tap->last[0] && strcmp(name, tap->last) == 0;
    bool is_restored = tap->restored[0] && strcmp(name, tap->restored) == 0;
    if (ask) return is_last || is_restored;

    size_t size = tap->num_bytes(tensor);
    if (is_restored) {
        if (size == tap->input_bytes) {
            tap->set(tensor, tap->input, 0, size);
            tap->num_restored++;
        } else {
            tap->failed = TAP_WRONG_SIZE;
        }
        return true;
    }
    if (grow(tap, tap->rows_bytes + size)) {
        tap->get(tensor, tap->rows + tap->rows_bytes, 0, size);
        tap->rows_bytes += size;
    } else {
        tap->failed = TAP_NO_MEMORY;
    }
    tap->num_fired++;
    return tap->goes_on;
}
