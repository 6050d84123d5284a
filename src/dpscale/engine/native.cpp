// Each sample's gradient of a convolution's weight, and the square of its norm; what tells rows apart: see native.py.
//
// A sample's image is copied with its padding, channels last, and unfolded into patches, all of which stays in the cache.
// A tile of T taps by V vectors of output channels is then added up in registers over all positions, squared, and written.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * WIDTH), aligned(4)));

// Zeros. Not a vector: a C compiler, which CXX may name, links no C++ library.
struct Room {
    float* data;
    explicit Room(int64_t count) : data((float*)calloc(count, sizeof(float))) {
        if (!data) abort();
    }
    ~Room() { free(data); }
};

struct Strides {
    int64_t image, channel, row, column;
};

// As native.py passes it.
struct Sizes {
    int64_t samples, images, channels, height, width, outputs, rows, columns;
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    Strides x, g;
};

typedef float Half __attribute__((vector_size(2 * WIDTH), aligned(4)));

// May read and write up to a vector more, for which all buffers have room.
static inline void copy(float* to, const float* from, int64_t count) {
    if (count <= WIDTH / 2) {
        *(Half*)to = *(const Half*)from;
        return;
    }
    for (int64_t k = 0; k < count; k += WIDTH) *(Vec*)(to + k) = *(const Vec*)(from + k);
}

// A row of pixels with all their channels, channels last.
static inline void gather(float* to, const float* from, int64_t pixels, int64_t channels, int64_t step, Strides s) {
    if ((s.channel == 1 || channels == 1) && s.column == channels && step == channels) {
        memcpy(to, from, pixels * channels * sizeof(float));
        return;
    }
    for (int64_t c = 0; c < channels; ++c)  // channels first, as a rule: what is read lies in one stretch
        for (int64_t p = 0; p < pixels; ++p) to[p * step + c] = from[p * s.column + c * s.channel];
}

template <int T, int V>
static inline Vec tile(const float* patches, int64_t taps, const float* g, int64_t g_step, int64_t positions, float* out,
                       int64_t outputs, int64_t left) {
    Vec sum[T][V] = {}, squares = {};
    for (int t = 0; t < T; ++t)  // or the stores at the end wait for memory
        for (int v = 0; v < V; ++v) __builtin_prefetch(out + t * outputs + v * WIDTH, 1);
    for (int64_t l = 0; l < positions; ++l) {
        Vec each[V];
        for (int v = 0; v < V; ++v) each[v] = *(const Vec*)(g + l * g_step + v * WIDTH);
        for (int t = 0; t < T; ++t)
            for (int v = 0; v < V; ++v) sum[t][v] += patches[l * taps + t] * each[v];
    }
    for (int t = 0; t < T; ++t)
        for (int v = 0; v < V; ++v) {
            squares += sum[t][v] * sum[t][v];
            if (left >= (v + 1) * WIDTH) *(Vec*)(out + t * outputs + v * WIDTH) = sum[t][v];
            else for (int64_t o = v * WIDTH; o < left; ++o) out[t * outputs + o] = sum[t][v][o - v * WIDTH];
        }
    return squares;
}

template <int T, int V>
static Vec strip(const float* patches, int64_t taps, const float* g, int64_t g_step, int64_t positions, float* out,
                 int64_t outputs, int64_t left) {
    Vec squares = {};
    int64_t p = 0;
    for (; p + T <= taps; p += T)
        squares += tile<T, V>(patches + p, taps, g, g_step, positions, out + p * outputs, outputs, left);
    for (; p + 8 <= taps; p += 8)
        squares += tile<8, V>(patches + p, taps, g, g_step, positions, out + p * outputs, outputs, left);
    for (; p + 4 <= taps; p += 4)
        squares += tile<4, V>(patches + p, taps, g, g_step, positions, out + p * outputs, outputs, left);
    const float* last = patches + p;
    float* to = out + p * outputs;
    switch (taps - p) {
        case 3: return squares + tile<3, V>(last, taps, g, g_step, positions, to, outputs, left);
        case 2: return squares + tile<2, V>(last, taps, g, g_step, positions, to, outputs, left);
        case 1: return squares + tile<1, V>(last, taps, g, g_step, positions, to, outputs, left);
    }
    return squares;
}

// The patches of one padded image, channels last, from the position `first` on.
static void unfold(float* patches, const float* image, const Sizes& n, int64_t wide, int64_t taps) {
    const int64_t run = n.kernel[1] * n.channels;
    for (int64_t r = 0; r < n.rows; ++r)
        for (int64_t s = 0; s < n.columns; ++s, patches += taps)
            for (int64_t i = 0; i < n.kernel[0]; ++i) {
                const float* row = image + ((r * n.stride[0] + i * n.dilation[0]) * wide + s * n.stride[1]) * n.channels;
                float* to = patches + i * run;
                if (n.dilation[1] == 1) copy(to, row, run);
                else for (int64_t j = 0; j < n.kernel[1]; ++j)
                    copy(to + j * n.channels, row + j * n.dilation[1] * n.channels, n.channels);
            }
}

// out: (samples, *kernel, channels, outputs), squares: (samples,).
extern "C" void dpscale_patch_gradients(const float* x, const float* g, float* out, float* squares, const Sizes* sizes,
                                        int threads) {
    const Sizes n = *sizes;
    const int64_t taps = n.kernel[0] * n.kernel[1] * n.channels, area = n.rows * n.columns;
    const int64_t wide = n.width + 2 * n.padding[1], high = n.height + 2 * n.padding[0];
    const int64_t step = (n.outputs + WIDTH - 1) / WIDTH * WIDTH, positions = n.images * area;
#pragma omp parallel num_threads(threads)
    {
        const Room padded(high * wide * n.channels + WIDTH), unfolded(positions * taps + WIDTH), laid_out(positions * step);
        float *image = padded.data, *patches = unfolded.data, *given = laid_out.data;
#pragma omp for
        for (int64_t b = 0; b < n.samples; ++b) {
            for (int64_t k = 0; k < n.images; ++k) {
                for (int64_t h = 0; h < n.height; ++h)
                    gather(&image[((h + n.padding[0]) * wide + n.padding[1]) * n.channels],
                           x + (b * n.images + k) * n.x.image + h * n.x.row, n.width, n.channels, n.channels, n.x);
                for (int64_t r = 0; r < n.rows; ++r)
                    gather(&given[(k * area + r * n.columns) * step], g + (b * n.images + k) * n.g.image + r * n.g.row,
                           n.columns, n.outputs, step, n.g);
                unfold(&patches[k * area * taps], image, n, wide, taps);
            }
            Vec found = {};
            float* to = out + b * taps * n.outputs;
            int64_t o = 0;
            for (; o + WIDTH < n.outputs; o += 2 * WIDTH)
                found += strip<12, 2>(patches, taps, &given[o], step, positions, to + o, n.outputs, n.outputs - o);
            if (o < n.outputs)
                found += strip<24, 1>(patches, taps, &given[o], step, positions, to + o, n.outputs, n.outputs - o);
            float sum = 0;
            for (int v = 0; v < WIDTH; ++v) sum += found[v];
            squares[b] = sum;
        }
    }
}

struct Row {
    int64_t nonzero, negative;
    double least, greatest;
    bool finite;
};

static Row told(const float* x, int64_t count) {
    typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
    Row row = {0, 0, x[0], x[0], true};
    Vec least = Vec{} + x[0], greatest = least;
    Ints nonzero = {}, negative = {}, odd = {};
    int64_t k = 0;
    for (; k + WIDTH <= count; k += WIDTH) {
        const Vec v = *(const Vec*)(x + k);
        least = v < least ? v : least;
        greatest = v > greatest ? v : greatest;
        nonzero -= v != 0.0f;  // what is true is -1
        negative -= v < 0.0f;
        odd |= v - v != 0.0f;  // of infinity and of what is no number, the difference is none
    }
    for (int i = 0; i < WIDTH && k; ++i) {
        row.nonzero += nonzero[i], row.negative += negative[i];
        row.finite &= !odd[i];
        row.least = least[i] < row.least ? least[i] : row.least;
        row.greatest = greatest[i] > row.greatest ? greatest[i] : row.greatest;
    }
    for (; k < count; ++k) {
        row.nonzero += x[k] != 0, row.negative += x[k] < 0;
        row.finite &= x[k] - x[k] == 0;
        row.least = x[k] < row.least ? x[k] : row.least;
        row.greatest = x[k] > row.greatest ? x[k] : row.greatest;
    }
    return row;
}

static Row told(const int64_t* x, int64_t count) {
    int64_t nonzero = 0, negative = 0, least = x[0], greatest = x[0];
    for (int64_t k = 0; k < count; ++k) {
        nonzero += x[k] != 0, negative += x[k] < 0;
        least = x[k] < least ? x[k] : least;
        greatest = x[k] > greatest ? x[k] : greatest;
    }
    return {nonzero, negative, (double)least, (double)greatest, true};
}

template <typename T>
static int rows_told(const T* x, int64_t rows, int64_t count, double* out, int threads) {
    int finite = 1;
#pragma omp parallel for num_threads(threads) reduction(& : finite) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const Row row = told(x + r * count, count);
        const double each[] = {(double)row.nonzero, (double)row.negative, row.least, row.greatest};
        for (int k = 0; k < 4; ++k) out[k * rows + r] = each[k];
        finite &= row.finite;
    }
    return finite;
}

// x: (rows, count), count > 0; out: (4, rows). Whether all is finite: if not, out is none.
extern "C" int dpscale_rows(const void* x, int whole, int64_t rows, int64_t count, double* out, int threads) {
    return whole ? rows_told((const int64_t*)x, rows, count, out, threads)
                 : rows_told((const float*)x, rows, count, out, threads);
}
