// Device memory lies at addresses that fault when the host touches them. The same pages are mapped a second time, where
// tasks reach them. Freed blocks are handed out again at once, poisoned, to the stream that they came from.

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fcntl.h>
#include <map>
#include <memory>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include "standin.h"

namespace standin {
namespace {

constexpr size_t kRange = size_t{32} << 30;  // addresses of one device; pages come when they are written
constexpr size_t kGrain = 512;
constexpr size_t kPinnedGrain = 4096;

size_t round_up(size_t n, size_t grain) { return (n + grain - 1) / grain * grain; }

// ---- the device

struct Block {
  c10::DeviceIndex device;
  c10::Stream stream;  // which it was allocated on
  size_t offset, size;
  std::vector<c10::Stream> used_on;  // record_stream
  std::vector<Point> uses;           // points to pass before it is handed out again
};

struct Arena {
  char* guarded = nullptr;  // what tensors point to
  char* shadow = nullptr;   // what tasks use
  int file = -1;
  std::map<size_t, size_t> gaps{{0, kRange}};  // offset: size
  std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>> ready;
  std::vector<Block*> pending;
  size_t live = 0, cached = 0;
  int64_t budget = int64_t{1} << 30;
  c10::CachingDeviceAllocator::DeviceStats stats;

  void open() {
    if (guarded) return;
    file = memfd_create("standin", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kRange) == 0, "standin: no memory file");
    const int flags = MAP_SHARED | MAP_NORESERVE;
    guarded = static_cast<char*>(mmap(nullptr, kRange, PROT_NONE, flags, file, 0));
    shadow = static_cast<char*>(mmap(nullptr, kRange, PROT_READ | PROT_WRITE, flags, file, 0));
    TORCH_CHECK(guarded != MAP_FAILED && shadow != MAP_FAILED, "standin: no addresses");
  }

  bool holds(const void* p) const { return guarded && p >= guarded && p < guarded + kRange; }

  size_t take_gap(size_t size) {
    for (auto gap = gaps.begin(); gap != gaps.end(); ++gap) {
      if (gap->second < size) continue;
      const auto [offset, room] = *gap;
      gaps.erase(gap);
      if (room > size) gaps[offset + size] = room - size;
      std::memset(shadow + offset, kPoison, size);
      return offset;
    }
    TORCH_CHECK(false, "standin: no addresses are left");
  }

  void give_gap(size_t offset, size_t size) {
    const size_t first = round_up(offset, kPinnedGrain), last = (offset + size) / kPinnedGrain * kPinnedGrain;
    if (last > first) fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first);
    auto next = gaps.lower_bound(offset);
    if (next != gaps.end() && offset + size == next->first) {
      size += next->second;
      next = gaps.erase(next);
    }
    if (next != gaps.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    gaps[offset] = size;
  }

  // As by the first write of a new owner. It comes no earlier: what is freed while another stream still uses it is safe
  // if the new owner is queued behind that use, as in FSDP2.
  void poison(Block* block) {
    char* start = shadow + block->offset;
    enqueue(block->stream, [start, size = block->size] { std::memset(start, kPoison, size); });
  }

  void retire(Block* block) {
    block->used_on.clear();
    block->uses.clear();
    ready[{block->stream.id(), block->size}].push_back(block);
  }

  void look_at_pending() {
    std::vector<Block*> waiting, passed;
    for (Block* block : pending) {
      bool all = true;
      for (const Point& point : block->uses) all = all && point.reached();
      (all ? passed : waiting).push_back(block);
    }
    pending = waiting;
    for (Block* block : passed) retire(block);
  }

  void drop_cached() {
    for (auto& [key, blocks] : ready)
      for (Block* block : blocks) {
        give_gap(block->offset, block->size);
        cached -= block->size;
        delete block;
      }
    ready.clear();
  }
};

Arena& arena(c10::DeviceIndex device) {
  static auto* all = new Arena[kDevices];
  return all[device];
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard guard(lock());
  Arena& own = arena(block->device);
  own.live -= block->size;
  own.cached += block->size;
  own.stats.allocated_bytes[0].decrease(block->size);
  own.stats.allocation[0].decrease(1);
  for (const c10::Stream& stream : block->used_on) block->uses.push_back(here(stream));
  if (block->uses.empty()) {
    own.retire(block);
  } else {
    own.pending.push_back(block);
  }
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = current_device();
    const c10::Device where(kDevice, device);
    if (bytes == 0) return {nullptr, nullptr, &free_block_or_none, where};
    const size_t size = round_up(bytes, kGrain);
    const c10::Stream stream = current_stream(device);
    Arena& own = arena(device);
    std::unique_lock guard(lock());
    own.open();
    own.look_at_pending();
    Block* block = reuse(own, stream, size);
    if (!block && own.live + own.cached + size > static_cast<size_t>(own.budget)) {
      guard.unlock();
      emptyCache();
      guard.lock();
      if (own.live + own.cached + size > static_cast<size_t>(own.budget)) {
        ++own.stats.num_ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "standin out of memory. Tried to allocate ", size, " bytes on ", where, ": ",
            own.live, " are in use, the budget is ", own.budget);
      }
    }
    if (!block) block = new Block{device, stream, own.take_gap(size), size, {}, {}};
    own.live += size;
    own.stats.allocated_bytes[0].increase(size);
    own.stats.allocation[0].increase(1);
    own.stats.reserved_bytes[0].peak = std::max<int64_t>(own.stats.reserved_bytes[0].peak, own.live + own.cached);
    own.stats.reserved_bytes[0].current = own.live + own.cached;
    return {own.guarded + block->offset, block, &free_block, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    enqueue(current_stream(current_device()), [=] { std::memcpy(shadow_of(to), shadow_of(from), count); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
      finish_device(device);
      {
        std::lock_guard guard(lock());
        arena(device).look_at_pending();
      }
      std::lock_guard guard(lock());
      arena(device).drop_cached();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard guard(lock());
    return arena(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard guard(lock());
    arena(device).stats.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard guard(lock());
    arena(device).stats.allocated_bytes[0].reset_peak();
    arena(device).stats.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard guard(lock());
    Arena& own = arena(device);
    return {own.budget - own.live - own.cached, own.budget};
  }

 private:
  static void free_block_or_none(void* context) {
    if (context) free_block(context);
  }

  static Block* reuse(Arena& own, c10::Stream stream, size_t size) {
    auto found = own.ready.find({stream.id(), size});
    if (found == own.ready.end() || found->second.empty()) return nullptr;
    Block* block = found->second.back();  // the one freed last
    found->second.pop_back();
    own.poison(block);
    own.cached -= size;
    return block;
  }
};

DeviceAllocator the_device_allocator;
REGISTER_ALLOCATOR(kDevice, &the_device_allocator)

// ---- pinned host memory

struct Pinned {
  char* start;
  size_t size;
  bool live;
  std::vector<Point> uses;
};

struct PinnedMemory {
  std::map<const char*, std::unique_ptr<Pinned>> blocks;  // by start
  std::vector<Pinned*> waiting;                           // freed, perhaps still read or written by copies
  std::map<size_t, std::vector<Pinned*>> ready;
  size_t live = 0;

  Pinned* find(const void* pointer) {
    auto next = blocks.upper_bound(static_cast<const char*>(pointer));
    if (next == blocks.begin()) return nullptr;
    Pinned* block = std::prev(next)->second.get();
    return block->live && pointer < block->start + block->size ? block : nullptr;
  }

  void retire(Pinned* block) {
    std::memset(block->start, kPoison, block->size);
    block->uses.clear();
    ready[block->size].push_back(block);
  }

  void look_at_waiting() {
    std::vector<Pinned*> left;
    for (Pinned* block : waiting) {
      bool all = true;
      for (const Point& point : block->uses) all = all && point.reached();
      if (all) {
        retire(block);
      } else {
        left.push_back(block);
      }
    }
    waiting = left;
  }
};

PinnedMemory& pinned() {
  static auto* instance = new PinnedMemory;
  return *instance;
}

void free_pinned(void* context) {
  if (!context) return;
  auto* block = static_cast<Pinned*>(context);
  std::lock_guard guard(lock());
  block->live = false;
  pinned().live -= block->size;
  pinned().waiting.push_back(block);
  pinned().look_at_waiting();
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, cpu};
    const size_t size = round_up(bytes, kPinnedGrain);
    std::lock_guard guard(lock());
    PinnedMemory& own = pinned();
    own.look_at_waiting();
    auto& found = own.ready[size];
    Pinned* block = nullptr;
    if (!found.empty()) {
      block = found.back();
      found.pop_back();
    } else {
      void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(start != MAP_FAILED, "standin: no pinned memory");
      std::memset(start, kPoison, size);
      auto made = std::make_unique<Pinned>(Pinned{static_cast<char*>(start), size, false, {}});
      block = made.get();
      own.blocks[block->start] = std::move(made);
    }
    block->live = true;
    own.live += size;
    return {block->start, block, &free_pinned, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    record_pinned(pointer, here(stream));
    return is_pinned(pointer);
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator the_pinned_allocator;
REGISTER_HOST_ALLOCATOR(kDevice, &the_pinned_allocator)

}  // namespace

void* shadow_of(const void* pointer) {
  c10::DeviceIndex device = 0;
  if (!pointer) return nullptr;
  TORCH_CHECK(is_device_pointer(pointer, &device), "standin: this memory is not on a device");
  return arena(device).shadow + (static_cast<const char*>(pointer) - arena(device).guarded);
}

bool is_device_pointer(const void* pointer, c10::DeviceIndex* device) {
  for (*device = 0; *device < kDevices; ++*device)
    if (arena(*device).holds(pointer)) return true;
  return false;
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  if (!data.get()) return;
  std::lock_guard guard(lock());
  auto* block = static_cast<Block*>(data.get_context());
  if (block && block->stream != stream) block->used_on.push_back(stream);
}

bool is_pinned(const void* pointer) {
  std::lock_guard guard(lock());
  return pinned().find(pointer) != nullptr;
}

void record_pinned(const void* pointer, Point point) {
  std::lock_guard guard(lock());
  if (Pinned* block = pinned().find(pointer)) block->uses.push_back(point);
}

c10::Allocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

void set_budget(c10::DeviceIndex device, int64_t bytes) {
  std::lock_guard guard(lock());
  arena(device).budget = bytes;
}

int64_t pinned_bytes() {
  std::lock_guard guard(lock());
  return pinned().live;
}

}  // namespace standin
