// Registers a CUDA device without memory or kernels in a PyTorch that was built for CPUs.
//
// Fake tensors then live on device "cuda": autograd runs on it and autocast casts by CUDA's rules.
// Page-locked host memory is ordinary memory whose addresses are recorded. Whatever blocks the CPU
// (synchronizing a stream or an event) is not implemented and raises.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <ATen/CPUGeneratorImpl.h>

#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;

// Address after each block of page-locked memory, and its size.
std::map<const void*, size_t> pinned_blocks;
std::mutex pinned_blocks_mutex;

void free_pinned(void* address) {
  {
    std::lock_guard<std::mutex> lock(pinned_blocks_mutex);
    pinned_blocks.erase(address);
  }
  c10::free_cpu(address);
}

struct PinnedAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> lock(pinned_blocks_mutex);
    pinned_blocks[address] = size;
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

struct FakeHooks : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void init() const override {}
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> lock(pinned_blocks_mutex);
    auto after = pinned_blocks.upper_bound(address);
    if (after == pinned_blocks.begin()) return false;
    auto [start, size] = *std::prev(after);
    return address < static_cast<const char*>(start) + size;
  }
};

struct FakeGuard : c10::impl::DeviceGuardImplInterface {
  static Device device() { return Device(CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
  c10::DeviceType type() const override { return CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return device(); }
  Device exchangeDevice(Device) const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};

}  // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", FakeHooks)
}
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)
}
