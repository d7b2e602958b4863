// dma_copy: one asynchronous copy for each run. The first failure ends the call.

#include "../copy.cuh"

extern "C" int gpu_tier_dma_copy(const char* src, char* dst, const int64_t* src_start, const int64_t* dst_start,
                                 const int64_t* nbytes, int64_t runs, void* stream) {
  for (int64_t i = 0; i < runs; ++i) {
    const cudaError_t code = cudaMemcpyAsync(dst + dst_start[i], src + src_start[i], static_cast<size_t>(nbytes[i]),
                                             cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
    if (code != cudaSuccess) return gpu_tier::settled(code);
  }
  return cudaSuccess;
}
