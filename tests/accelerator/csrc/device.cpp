// Devices, current streams, events and generators, as torch asks for them.

#include <ATen/Utils.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstring>

#include "standin.h"

namespace standin {
namespace {

constexpr c10::StreamId kStreams = 32;  // of the pool of one device, after which they repeat as CUDA's do

thread_local c10::DeviceIndex device_here = 0;
thread_local std::array<c10::StreamId, kDevices> streams_here{};
std::array<std::atomic<c10::StreamId>, kDevices> next_stream{};

c10::Device device_of(c10::DeviceIndex index) { return {kDevice, index}; }

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < kDevices, "standin has no device ", static_cast<int>(index));
}

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(index), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return device_of(device_here); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    check_index(device.index());
    device_here = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_here = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto index = index_of(device);
    return stream_of(index, 1 + next_stream[index]++ % kStreams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    streams_here[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return passed(here(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { finish(here(stream)); }
  void synchronizeDevice(c10::DeviceIndex index) const override { finish_device(index); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Point;
    *static_cast<Point*>(*event) = here(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(stream, *static_cast<Point*>(event));
  }
  bool queryEvent(void* event) const override { return !event || passed(*static_cast<Point*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) finish(*static_cast<Point*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Point*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : device_here; }
  static bool passed(const Point& point) {
    {
      std::lock_guard guard(lock());
      if (point.reached()) return true;
    }
    nudge();  // who asks again and again gets an answer
    std::lock_guard guard(lock());
    return point.reached();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Draws a seed for each operator that is random, when it is queued. So its numbers do not depend on when it runs.
struct Random final : c10::GeneratorImpl {
  explicit Random(c10::DeviceIndex index)
      : c10::GeneratorImpl(device_of(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { state = {seed, 0}; }
  void set_offset(uint64_t offset) override { state[1] = offset; }
  uint64_t get_offset() const override { return state[1]; }
  uint64_t current_seed() const override { return state[0]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state[0];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor out = at::empty({sizeof(state)}, at::TensorOptions(at::kByte));
    std::memcpy(out.mutable_data_ptr(), state.data(), sizeof(state));
    return out.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& given) override {
    TORCH_CHECK(given.numel() == sizeof(state), "standin: the state of a generator has ", sizeof(state), " bytes");
    std::memcpy(state.data(), given.data(), sizeof(state));
  }
  Random* clone_impl() const override {
    auto* made = new Random(device().index());
    made->state = state;
    return made;
  }

  std::array<uint64_t, 2> state{c10::default_rng_seed_val, 0};  // seed and how many were drawn
};

at::Generator make_generator(c10::DeviceIndex index) {
  return at::make_generator<Random>(index < 0 ? device_here : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return device_here; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_index(index);
    device_here = index;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = device_here;
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    c10::DeviceIndex index = 0;
    TORCH_CHECK(is_device_pointer(data, &index), "standin: this memory is not on a device");
    return device_of(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = device_allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) device_allocator()->copy_data(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::DeviceIndex current_device() { return device_here; }

c10::Stream current_stream(c10::DeviceIndex device) { return stream_of(device, streams_here[device]); }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::array<at::Generator, kDevices>{make_generator(0), make_generator(1)};
  return (*all)[device < 0 ? device_here : device];
}

uint64_t draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  const at::Generator& used = generator && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(used.device().type() == kDevice, "standin: the generator is on ", used.device());
  auto* random = used.get<Random>();
  std::lock_guard guard(random->mutex_);
  return random->state[0] * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u * ++random->state[1];
}

}  // namespace standin
