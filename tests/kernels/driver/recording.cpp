// A CUDA driver that writes down what it is asked to do, a line for each call. Structures and numbers are those that
// the CUDA driver's reference states. RECORD names the file; REFUSE the call that fails, with CUDA_ERROR_INVALID_IMAGE.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

struct Attribute {
    unsigned id, padding;
    unsigned char value[64];
};
static_assert(sizeof(Attribute) == 72 && offsetof(Attribute, value) == 8, "as on Linux");
struct Config {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared;
    void* stream;
    const Attribute* attributes;
    unsigned count;
};
static_assert(sizeof(Config) == 56 && offsetof(Config, stream) == 32 && offsetof(Config, count) == 48, "as on Linux");

static int depth = 0;  // of contexts that are current

template <typename... Values>
static int told(const char* name, const char* format, Values... values) {
    FILE* file = std::fopen(std::getenv("RECORD"), "a");
    std::fprintf(file, "%s ", name);
    std::fprintf(file, format, values...);
    std::fprintf(file, "\n");
    std::fclose(file);
    const char* refused = std::getenv("REFUSE");
    return refused != nullptr && std::strcmp(refused, name) == 0 ? 200 : 0;
}

extern "C" {
int cuInit(unsigned flags) { return told("cuInit", "%u", flags); }
int cuDeviceGet(int* device, int number) {
    *device = 40 + number;
    return told("cuDeviceGet", "%d", number);
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(0x1000000000u + device);
    return told("cuDevicePrimaryCtxRetain", "%d", device);
}
int cuCtxPushCurrent_v2(void* context) {
    ++depth;
    return told("cuCtxPushCurrent", "%p", context);
}
int cuCtxPopCurrent_v2(void** context) {
    *context = nullptr;
    return told("cuCtxPopCurrent", "%d", --depth);
}
int cuModuleLoadData(void** module, const void* image) {
    *module = reinterpret_cast<void*>(0x2000000000u);
    return told("cuModuleLoadData", "%s %d", static_cast<const char*>(image), depth);
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = reinterpret_cast<void*>(0x3000000000u + std::strlen(name));
    return told("cuModuleGetFunction", "%p %s", module, name);
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
    return told("cuFuncSetAttribute", "%p %d %d", function, attribute, value);
}
int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
    const unsigned *grid = config->grid, *block = config->block;
    int status = told("cuLaunchKernelEx", "%p grid %u %u %u block %u %u %u shared %u stream %p attributes %u extra %d %d",
                      function, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared,
                      config->stream, config->count, extra != nullptr, depth);
    for (unsigned i = 0; i < config->count; i++) {
        int value;
        std::memcpy(&value, config->attributes[i].value, sizeof value);
        told("attribute", "%u %d", config->attributes[i].id, value);
    }
    // the kernels that the tests launch with arguments take a pointer, a number, a float and a pointer
    if (arguments != nullptr && std::getenv("ARGUMENTS") != nullptr) {
        told("arguments", "%p %d %.9g %p", *static_cast<void**>(arguments[0]), *static_cast<int32_t*>(arguments[1]),
             *static_cast<float*>(arguments[2]), *static_cast<void**>(arguments[3]));
    }
    return status;
}
int cuGetErrorName(int, const char** text) {
    *text = "CUDA_ERROR_INVALID_IMAGE";
    return 0;
}
int cuGetErrorString(int, const char** text) {
    *text = "device kernel image is invalid";
    return 0;
}
}
