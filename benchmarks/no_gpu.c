/* A GPU without a GPU: CUDA's runtime, as far as torch asks it for more than success. Memory is the host's, zero at first;
 * copies copy, kernels and cuBLAS do nothing. `benchmarks/dry_run_cuda.py` adds a function that returns 0 for every other
 * name that torch takes from CUDA, and preloads the whole. It passes for an A100 (8.0), for which torch takes its own attention
 * kernels and not cuDNN's. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT(name, arguments, body) cudaError_t name arguments { body; return cudaSuccess; }

EXPORT(cudaGetDeviceCount, (int *n), *n = 1)
EXPORT(cudaGetDevice, (int *n), *n = 0)
EXPORT(cudaSetDevice, (int n), if (n) return cudaErrorInvalidDevice)
EXPORT(cudaDriverGetVersion, (int *n), *n = CUDART_VERSION)
EXPORT(cudaRuntimeGetVersion, (int *n), *n = CUDART_VERSION)

cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int n) {
    switch (a) { /* a sort divides by some of these */
        case cudaDevAttrComputeCapabilityMajor: *v = 8; break;
        case cudaDevAttrMultiProcessorCount: *v = 108; break;
        case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: *v = 1024; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
        case cudaDevAttrMaxGridDimX: *v = 0x7fffffff; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *v = 48 << 10; break;
        case cudaDevAttrWarpSize: *v = 32; break;
        default: *v = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int n) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "no GPU");
    p->major = 8, p->multiProcessorCount = 108, p->warpSize = 32, p->totalGlobalMem = 80ull << 30, p->l2CacheSize = 40 << 20;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 163 << 10, p->sharedMemPerMultiprocessor = 164 << 10;
    for (int i = 0; i < 3; i++) p->maxGridSize[i] = i ? 65535 : 0x7fffffff, p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n) { return (*p = calloc(1, n ? n : 1)) ? cudaSuccess : cudaErrorMemoryAllocation; }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) { return cudaMalloc(p, n); }
EXPORT(cudaFree, (void *p), free(p))
EXPORT(cudaFreeHost, (void *p), free(p))
EXPORT(cudaMemGetInfo, (size_t *f, size_t *t), *f = *t = 80ull << 30)
EXPORT(cudaMemcpy, (void *to, const void *from, size_t n, enum cudaMemcpyKind k), memcpy(to, from, n))
EXPORT(cudaMemcpyAsync, (void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s), memcpy(to, from, n))
EXPORT(cudaMemsetAsync, (void *p, int value, size_t n, cudaStream_t s), memset(p, value, n))
EXPORT(cudaPointerGetAttributes, (struct cudaPointerAttributes *a, const void *p),
       (memset(a, 0, sizeof *a), a->type = cudaMemoryTypeHost))

EXPORT(cudaStreamIsCapturing, (cudaStream_t s, enum cudaStreamCaptureStatus *c), *c = cudaStreamCaptureStatusNone)
EXPORT(cudaStreamGetCaptureInfo, (cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
       const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n), *c = cudaStreamCaptureStatusNone)
EXPORT(cudaDeviceGetStreamPriorityRange, (int *low, int *high), *low = *high = 0)
EXPORT(cudaEventElapsedTime, (float *ms, cudaEvent_t a, cudaEvent_t b), *ms = 1)
EXPORT(cudaFuncGetAttributes, (struct cudaFuncAttributes *a, const void *f),
       (memset(a, 0, sizeof *a), a->maxThreadsPerBlock = 1024, a->ptxVersion = a->binaryVersion = 80))
EXPORT(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, (int *n, const void *f, int b, size_t s, unsigned flags), *n = 1)

CUresult cuCtxGetCurrent(CUcontext *c) { return *c = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { return *flags = 0, *active = 1, CUDA_SUCCESS; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *best, int *found) {
    return memset(best, 0, 96), *found = 1, 0;
}
