// Claims that there is one CUDA device. On a machine without one, fake tensors on cuda:0 then go the way of a GPU. Nothing can be
// computed on it. pretended_gpu.py builds this, and preloads it, because PyTorch looks for devices only once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace pretended {

using c10::Device, c10::DeviceIndex, c10::Stream;

const Device kDevice(c10::DeviceType::CUDA, 0);
const Stream kStream(Stream::DEFAULT, kDevice);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return kStream; }
  Stream getDefaultStream(Device) const override { return kStream; }
  Stream exchangeStream(Stream) const override { return kStream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {  // PyTorch asks for a class of this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// A build for CUDA registers a guard of its own when it is imported: call this afterwards.
extern "C" void claim_device() {
  static const Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kDevice.type())].store(&guard);
}

}  // namespace pretended

namespace at {
using pretended::CUDAHooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}  // namespace at
