// AdamW over many tensors in one launch: every gradient, main parameter and moment is read once and written once, and the model's
// bf16 weight is rounded from the new main parameter in the same pass.
//
// Bytes per parameter with a bf16 gradient and a bf16 weight: read 4 (main) + 4 + 4 (moments) + 2 (gradient), write 4 + 4 + 4 + 2,
// 28 in all. The order of roundings is that of reference.py, operation by operation: __fmul_rn and friends keep the compiler from
// contracting what the reference rounds apart.
//
// Rows of a token embedding that no batch has named yet have moments and gradients of zero. Where the update is then the identity,
// their gradient is all that is read: each block keeps which of its pieces have moments of zero in memory of its own.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 512;
constexpr int kVector = 4;
constexpr int kPiece = kThreads * kVector;  // what a block does in one round: a row of the base model's embedding
constexpr int kMaxPieces = 32;              // of a block: one bit each
constexpr int kBatch = 8;                   // gradient vectors that a thread loads at once; divides kMaxPieces
constexpr unsigned kAllLanes = 0xffffffffu;

// One row of the tensor table, as op.py packs it: five addresses, the number of elements, and what the addresses hold.
struct Row {
    float* main;
    float* exp_avg;
    float* exp_avg_sq;
    const void* gradient;
    __nv_bfloat16* weight;  // null: the main parameter is the weight
    int64_t numel;
    int64_t gradient_is_bf16;
    int64_t is_aligned;  // all addresses allow vectors of four elements
};

// What a block knows about the moments of its pieces, one bit per piece: all +0, or not. Neither bit: unknown (at first, and after
// anyone else may have written to them). The last elements of a row that fill no vector are no part of a piece.
struct Known {
    unsigned zero, nonzero;
};

struct Scalars {
    float decay, scale, bias_correction2_sqrt, negative_step_size;
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
};

__device__ __forceinline__ void update(float& main, float& exp_avg, float& exp_avg_sq, float raw_gradient, const Scalars& s) {
    const float gradient = __fmul_rn(raw_gradient, s.scale);
    const float decayed = __fmul_rn(main, s.decay);
    exp_avg = __fmaf_rn(s.one_minus_beta1, gradient, __fmul_rn(exp_avg, s.beta1));
    exp_avg_sq = __fmaf_rn(s.one_minus_beta2, __fmul_rn(gradient, gradient), __fmul_rn(exp_avg_sq, s.beta2));
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(exp_avg_sq), s.bias_correction2_sqrt), s.eps);
    denominator = __fdiv_rn(denominator, s.negative_step_size);
    main = __fadd_rn(decayed, __fdiv_rn(exp_avg, denominator));
}

// Whether the update changes nothing where the moments are +0 and the gradient is +0 or -0: reference.py says why this is enough.
__device__ __forceinline__ bool skips_untouched(const Scalars& s) {
    const float denominator = __fdiv_rn(__fadd_rn(__fdiv_rn(0.0f, s.bias_correction2_sqrt), s.eps), s.negative_step_size);
    return s.decay == 1.0f && __fmul_rn(0.0f, s.scale) == 0.0f && __float_as_uint(__fdiv_rn(0.0f, denominator)) == 0x80000000u;
}

__device__ __forceinline__ bool has_bits(const float4& v) {
    return (__float_as_uint(v.x) | __float_as_uint(v.y) | __float_as_uint(v.z) | __float_as_uint(v.w)) != 0;
}

__device__ __forceinline__ bool has_magnitude(const uint2& bf16) { return ((bf16.x | bf16.y) & 0x7fff7fffu) != 0; }
__device__ __forceinline__ bool has_magnitude(const uint4& fp32) {
    return ((fp32.x | fp32.y | fp32.z | fp32.w) & 0x7fffffffu) != 0;
}

// One bit per piece of a block's `count` gradient vectors: whether this thread's vector holds anything but +0 and -0. Without
// branches, so that kBatch loads are under way at once: beyond the end, the last vector is read again.
template <typename Vector>
__device__ __forceinline__ unsigned pieces_with_gradient(const Vector* gradient, int count, int num_pieces) {
    unsigned found = 0;
    for (int first = 0; first < num_pieces; first += kBatch) {
        Vector batch[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            const int place = (first + j) * kThreads + static_cast<int>(threadIdx.x);
            batch[j] = __ldcs(gradient + min(place, count - 1));
        }
#pragma unroll
        for (int j = 0; j < kBatch; j++) found |= static_cast<unsigned>(has_magnitude(batch[j])) << (first + j);
    }
    return found;
}

// The bits that any thread of the block has set. Every thread of the block must call it; `shared` is 0 and becomes the result.
__device__ __forceinline__ unsigned any_of_block(unsigned bits, unsigned* shared) {
    bits = __reduce_or_sync(kAllLanes, bits);
    if (bits != 0 && threadIdx.x % 32 == 0) atomicOr(shared, bits);
    __syncthreads();
    return *shared;
}

__device__ __forceinline__ float4 load_gradient(const Row& row, int64_t index) {
    if (row.gradient_is_bf16) {
        const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(row.gradient) + index));
        // A bf16 number is the upper half of the fp32 number.
        return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
                           __uint_as_float(bits.y & 0xffff0000u));
    }
    return __ldcs(reinterpret_cast<const float4*>(static_cast<const float*>(row.gradient) + index));
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(
    const Row* __restrict__ rows, const int32_t* __restrict__ row_of_block, const int32_t* __restrict__ chunk_of_block,
    int64_t chunk, Known* __restrict__ known_of_block, const float* __restrict__ decay, const float* __restrict__ scale,
    const float* __restrict__ bias_correction2_sqrt, const float* __restrict__ negative_step_size,
    const bool* __restrict__ keep, float beta1, float beta2, float one_minus_beta1, float one_minus_beta2, float eps) {
    if (keep != nullptr && !*keep) return;  // a refused step changes nothing
    const Scalars s{*decay, *scale, *bias_correction2_sqrt, *negative_step_size, beta1, beta2, one_minus_beta1, one_minus_beta2, eps};
    const Row row = rows[row_of_block[blockIdx.x]];
    const int64_t begin = chunk_of_block[blockIdx.x] * chunk;
    const int64_t end = min(begin + chunk, row.numel);
    int64_t done = begin;
    if (row.is_aligned) {
        const int64_t vector_end = begin + (end - begin) / kVector * kVector;
        const int num_pieces = static_cast<int>((vector_end - begin + kPiece - 1) / kPiece);
        // All that decides about barriers is the same for all threads of the block.
        const Known known = known_of_block[blockIdx.x];
        const unsigned all = num_pieces == kMaxPieces ? kAllLanes : (1u << num_pieces) - 1;
        const bool is_settled = known.nonzero == all;  // no piece can be skipped, and moments do not become zero again
        __shared__ unsigned touched, nonzero;
        if (!is_settled) {
            if (threadIdx.x == 0) touched = nonzero = 0;
            __syncthreads();
        }
        unsigned skipped = 0;
        if (known.zero != 0 && skips_untouched(s)) {
            const int count = static_cast<int>((vector_end - begin) / kVector);
            const unsigned mine =
                row.gradient_is_bf16
                    ? pieces_with_gradient(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(row.gradient) + begin),
                                           count, num_pieces)
                    : pieces_with_gradient(reinterpret_cast<const uint4*>(static_cast<const float*>(row.gradient) + begin),
                                           count, num_pieces);
            skipped = known.zero & ~any_of_block(mine, &touched);
        }
        unsigned has_moments = 0;
        int piece = 0;
        for (int64_t i = begin + threadIdx.x * kVector; i < vector_end; i += kPiece, piece++) {
            if (skipped >> piece & 1) continue;
            // Streaming hints: nothing here is read again before the next step.
            float4 main = __ldcs(reinterpret_cast<const float4*>(row.main + i));
            float4 exp_avg = __ldcs(reinterpret_cast<const float4*>(row.exp_avg + i));
            float4 exp_avg_sq = __ldcs(reinterpret_cast<const float4*>(row.exp_avg_sq + i));
            const float4 gradient = load_gradient(row, i);
            update(main.x, exp_avg.x, exp_avg_sq.x, gradient.x, s);
            update(main.y, exp_avg.y, exp_avg_sq.y, gradient.y, s);
            update(main.z, exp_avg.z, exp_avg_sq.z, gradient.z, s);
            update(main.w, exp_avg.w, exp_avg_sq.w, gradient.w, s);
            __stcs(reinterpret_cast<float4*>(row.main + i), main);
            __stcs(reinterpret_cast<float4*>(row.exp_avg + i), exp_avg);
            __stcs(reinterpret_cast<float4*>(row.exp_avg_sq + i), exp_avg_sq);
            if (row.weight != nullptr) {
                const __nv_bfloat162 low = __floats2bfloat162_rn(main.x, main.y), high = __floats2bfloat162_rn(main.z, main.w);
                uint2 bits;
                bits.x = *reinterpret_cast<const unsigned int*>(&low);
                bits.y = *reinterpret_cast<const unsigned int*>(&high);
                *reinterpret_cast<uint2*>(row.weight + i) = bits;
            }
            if (has_bits(exp_avg) || has_bits(exp_avg_sq)) has_moments |= 1u << piece;
        }
        done = vector_end;
        if (!is_settled) {
            const unsigned found = any_of_block(has_moments, &nonzero);
            if (threadIdx.x == 0) known_of_block[blockIdx.x] = Known{all & ~found, found};
        }
    } else if (threadIdx.x == 0) {
        // Gradients may lie elsewhere at the next call, where vectors fit: what was known is of the moments before this step.
        known_of_block[blockIdx.x] = Known{0, 0};
    }
    for (int64_t i = done + threadIdx.x; i < end; i += kThreads) {
        float main = row.main[i], exp_avg = row.exp_avg[i], exp_avg_sq = row.exp_avg_sq[i];
        const float gradient = row.gradient_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(row.gradient)[i])
                                                    : static_cast<const float*>(row.gradient)[i];
        update(main, exp_avg, exp_avg_sq, gradient, s);
        row.main[i] = main;
        row.exp_avg[i] = exp_avg;
        row.exp_avg_sq[i] = exp_avg_sq;
        if (row.weight != nullptr) row.weight[i] = __float2bfloat16_rn(main);
    }
}

}  // namespace

// Addresses are device addresses; `chunk` is a multiple of kPiece, at most kMaxPieces of them; `known` are two words per block, zero
// at first. Returns cudaGetLastError().
extern "C" int adamw_launch(const void* rows, const void* row_of_block, const void* chunk_of_block, int num_blocks, int64_t chunk,
                            void* known, const void* decay, const void* scale, const void* bias_correction2_sqrt,
                            const void* negative_step_size, const void* keep, float beta1, float beta2, float one_minus_beta1,
                            float one_minus_beta2, float eps, void* stream) {
    adamw_kernel<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const Row*>(rows), static_cast<const int32_t*>(row_of_block), static_cast<const int32_t*>(chunk_of_block),
        chunk, static_cast<Known*>(known), static_cast<const float*>(decay), static_cast<const float*>(scale),
        static_cast<const float*>(bias_correction2_sqrt), static_cast<const float*>(negative_step_size),
        static_cast<const bool*>(keep), beta1, beta2, one_minus_beta1, one_minus_beta2, eps);
    return static_cast<int>(cudaGetLastError());
}
