// A CUDA driver and runtime on which every call succeeds and nothing is computed; it counts what a GPU would do.
// Addresses of a GPU store nothing. What is read from them is 0, except that a single bool is true and a single int64,
// such as a length, is 2. PyTorch calls more functions than are defined here; __main__.py generates the others.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
long kernels, graphs, waits, copied, pageable;  // copied: bytes, to a GPU; pageable: copies to it from pageable memory

// Memory
static uintptr_t next_on_gpu = 0x700000000000, next_pinned = 0x600000000000;
static int on_gpu(const void *address) { return (uintptr_t)address >> 40 == 0x70; }
static int is_pinned(const void *address) { return (uintptr_t)address >> 40 == 0x60; }
static void *reserve(uintptr_t *next, size_t size) {
    return (void *)__sync_fetch_and_add(next, (size + 0x1fffff) & ~(size_t)0x1fffff);
}
cudaError_t cudaMalloc(void **to, size_t size) { *to = reserve(&next_on_gpu, size); return 0; }
cudaError_t cudaHostAlloc(void **to, size_t size, unsigned flags) {
    int mapping = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    *to = mmap(reserve(&next_pinned, size), size, PROT_READ | PROT_WRITE, mapping, -1, 0);
    return 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (on_gpu(to) && !on_gpu(from)) copied += size, pageable += !is_pinned(from);
    if (!on_gpu(to) && on_gpu(from)) memset(to, 0, size), *(char *)to = size == 8 ? 2 : size == 1;
    if (!on_gpu(to) && !on_gpu(from)) memcpy(to, from, size);
    return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *address) {
    to->type = on_gpu(address) ? cudaMemoryTypeDevice : is_pinned(address) ? cudaMemoryTypeHost : 0;
    to->device = 0, to->devicePointer = to->hostPointer = (void *)address;
    return 0;
}
CUresult cuPointerGetAttribute(void *to, CUpointer_attribute name, CUdeviceptr p) { *(CUdeviceptr *)to = p; return 0; }

// Devices: as many as FAKE_GPUS says, like an H100
static __thread int device;
cudaError_t cudaDeviceGetAttribute(int *to, enum cudaDeviceAttr name, int number) {
    switch (name) {
        case cudaDevAttrComputeCapabilityMajor: *to = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *to = 0; break;
        case cudaDevAttrMultiProcessorCount: *to = 132; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *to = 232448; break;
        case cudaDevAttrWarpSize: *to = 32; break;
        default: *to = 1024;
    }
    return 0;
}
CUresult cuDeviceGetAttribute(int *to, CUdevice_attribute name, int number) {
    return cudaDeviceGetAttribute(to, name, number);  // the numbers of the names are the same
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int number) {
    *to = (struct cudaDeviceProp){
        .totalGlobalMem = 85ul << 30, .sharedMemPerBlock = 49152, .regsPerBlock = 65536, .warpSize = 32, .major = 9,
        .maxThreadsPerBlock = 1024, .maxGridSize = {INT_MAX, 65535, 65535}, .maxThreadsDim = {1024, 1024, 64},
        .multiProcessorCount = 132, .maxThreadsPerMultiProcessor = 2048, .maxBlocksPerMultiProcessor = 32,
    };
    return 0;
}
cudaError_t cudaGetDeviceCount(int *to) { *to = getenv("FAKE_GPUS") ? atoi(getenv("FAKE_GPUS")) : 1; return 0; }
cudaError_t cudaGetDevice(int *to) { *to = device; return 0; }
cudaError_t cudaSetDevice(int number) { device = number; return 0; }
CUresult cuDeviceGet(CUdevice *to, int number) { *to = number; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *to, int from, int peer) { *to = 1; return 0; }
cudaError_t cudaDriverGetVersion(int *to) { *to = CUDA_VERSION; return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice number, unsigned *flags, int *active) { *active = 1; return 0; }

// Streams, events and graphs. To wait is an error where it breaks a capture, of the stream or of this thread.
static void *capturing;
static __thread int captures;
static __thread enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

static cudaError_t in_capture(void *stream) {
    int is_forbidden = capturing && (stream == capturing || captures) && mode != cudaStreamCaptureModeRelaxed;
    return is_forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { waits++; return in_capture(stream); }
cudaError_t cudaDeviceSynchronize(void) { waits++; return in_capture(capturing); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { waits++; return in_capture(0); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return in_capture(0); }
cudaError_t cudaEventElapsedTime(float *to, cudaEvent_t start, cudaEvent_t end) { *to = 10; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *other) {
    enum cudaStreamCaptureMode before = mode;
    mode = *other, *other = before;
    return 0;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode checks) {
    capturing = stream, captures = 1;
    return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *to) {
    capturing = 0, captures = 0, *to = malloc(1);
    return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *to) {
    *to = capturing && stream == capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *to, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *num_nodes) {
    if (id) *id = 1;
    if (num_nodes) *num_nodes = 0;
    return cudaStreamIsCapturing(stream, to);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { graphs++; return 0; }

// Kernels, errors, and functions by name
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *function) {
    *to = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 64, .ptxVersion = 90, .binaryVersion = 90};
    return 0;
}
CUresult cuFuncGetAttribute(int *to, CUfunction_attribute name, CUfunction f) { *to = name ? 0 : 1024; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *algorithms, int *found) {
    *found = 1;
    return 0;
}
const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorStreamCaptureUnsupported"; }
const char *cudaGetErrorString(cudaError_t error) { return "forbidden in a capture (fake GPU)"; }
static long nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    *to = dlsym(RTLD_DEFAULT, name) ?: nothing;
    if (status) *status = cudaDriverEntryPointSuccess;
    return 0;
}
