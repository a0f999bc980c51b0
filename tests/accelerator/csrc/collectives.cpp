// A process group's part for tensors of the stand-in. It does as NCCL's does: a collective is queued on a stream of the
// group, or on the current one if the caller waits anyway; the host goes on. What it computes is gloo's, on the host.
//
// On its stream a collective is four tasks: copy the inputs to host memory; tell all ranks that this device has come so
// far; wait behind a gate; copy the results back. A thread of each group hears of the first rank that has come so far,
// makes its own device come there too, lets gloo do the collective, and opens the gate. So no collective begins before
// a device needs it, and none waits for a host that does something else.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <fcntl.h>
#include <linux/futex.h>
#include <map>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include "standin.h"

namespace standin {
namespace {

using Tensors = std::vector<at::Tensor>;
using OnHost = std::function<c10::intrusive_ptr<c10d::Work>(Tensors& inputs, Tensors& outputs)>;

// The number of the last collective that a device of the group has come to, in memory that all ranks share.
class Board {
 public:
  Board(c10d::Store& store, int rank) {
    int file = -1;
    if (rank == 0) {
      file = memfd_create("standin_board", MFD_CLOEXEC);
      TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(Number)) == 0, "standin: no memory for a board");
      const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
      store.set("board", std::vector<uint8_t>(path.begin(), path.end()));
    } else {
      const auto path = store.get("board");
      file = open(std::string(path.begin(), path.end()).c_str(), O_RDWR | O_CLOEXEC);
      TORCH_CHECK(file >= 0, "standin: rank 0 has no board any more");
    }
    void* start = mmap(nullptr, sizeof(Number), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(start != MAP_FAILED, "standin: no addresses for a board");
    last_ = static_cast<Number*>(start);
    if (rank != 0) close(file);  // rank 0's has to stay open for the others
  }

  void arrive(uint32_t number) {
    uint32_t before = *last_;
    while (before < number && !last_->compare_exchange_weak(before, number)) {
    }
    syscall(SYS_futex, last_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  void wait_for(uint32_t number) {
    for (uint32_t seen = *last_; seen < number; seen = *last_) {
      syscall(SYS_futex, last_, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }
  }

 private:
  using Number = std::atomic<uint32_t>;
  Number* last_;
};

// A collective on its way. wait() lets the current stream wait, not the host.
struct Queued final : c10d::Work {
  Queued(int rank, c10d::OpType type, c10::Stream stream, Tensors used, Tensors results)
      : c10d::Work(rank, type), end(here(stream)), device(stream.device()), used(std::move(used)), results(results) {
    const c10::StreamGuard guard(stream);
    future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    future->markCompleted(c10::IValue(results));
  }

  bool isCompleted() override {
    std::lock_guard guard(lock());
    return end.reached();
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    standin::wait(current_stream(device.index()), end);
    used.clear();  // whoever frees it now frees it behind the wait
    if (retrieveOpType() == c10d::OpType::BARRIER) standin::finish(end);
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  Point end;
  c10::Device device;
  Tensors used;  // kept until somebody waits, or all is done
  Tensors results;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

class Collectives final : public c10d::Backend {
 public:
  Collectives(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Backend>& on_host)
      : c10d::Backend(on_host->getRank(), on_host->getSize()), on_host_(on_host), board_(*store, rank_) {
    thread_ = std::thread([this] { work(); });
  }

  ~Collectives() override {
    {
      std::lock_guard guard(mutex_);
      ends_ = true;
      board_.arrive(issued_);
    }
    changed_.notify_all();
    thread_.join();
  }

  const std::string getBackendName() const override { return "standin_gloo"; }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return queue(c10d::OpType::ALLREDUCE, tensors, {}, options.asyncOp, [=, this](Tensors& own, Tensors&) {
      return on_host_->allreduce(own, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return queue(c10d::OpType::ALLREDUCE_COALESCED, tensors, {}, options.asyncOp, [=, this](Tensors& own, Tensors&) {
      return on_host_->allreduce_coalesced(own, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return queue(c10d::OpType::BROADCAST, tensors, {}, options.asyncOp, [=, this](Tensors& own, Tensors&) {
      return on_host_->broadcast(own, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return queue(c10d::OpType::REDUCE, tensors, {}, options.asyncOp, [=, this](Tensors& own, Tensors&) {
      return on_host_->reduce(own, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return queue(c10d::OpType::ALLGATHER, inputs, outputs.at(0), options.asyncOp, [=, this](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return on_host_->allgather(lists, in, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return queue(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, options.asyncOp, [=, this](Tensors& in, Tensors& out) {
      return on_host_->_allgather_base(out[0], in[0], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return queue(c10d::OpType::COALESCED, inputs, outputs, options.asyncOp, [=, this](Tensors& in, Tensors& out) {
      return on_host_->allgather_into_tensor_coalesced(out, in, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return queue(
        c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, options.asyncOp, [=, this](Tensors& in, Tensors& out) {
          return on_host_->_reduce_scatter_base(out[0], in[0], options);
        });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return queue(c10d::OpType::COALESCED, inputs, outputs, options.asyncOp, [=, this](Tensors& in, Tensors& out) {
      return on_host_->reduce_scatter_tensor_coalesced(out, in, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received, std::vector<int64_t>& sent,
      const c10d::AllToAllOptions& options) override {
    return queue(c10d::OpType::ALLTOALL_BASE, {input}, {output}, options.asyncOp, [=, this](Tensors& in, Tensors& out) {
      std::vector<int64_t> there = received, here = sent;
      return on_host_->alltoall_base(out[0], in[0], there, here, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    const c10::Device device = options.device.value_or(c10::Device(kDevice, current_device()));
    return queue(c10d::OpType::BARRIER, {at::zeros({1}, at::TensorOptions(device))}, {}, options.asyncOp,
                 [this](Tensors& own, Tensors&) { return on_host_->allreduce(own); });
  }

 private:
  struct Item {
    uint32_t number;
    Point start;
    std::shared_ptr<Gate> gate;
    std::function<void()> run;
  };

  c10::intrusive_ptr<c10d::Work> queue(
      c10d::OpType type, const Tensors& inputs, const Tensors& outputs, bool is_async, const OnHost& on_host) {
    const Tensors& results = outputs.empty() ? inputs : outputs;
    const c10::Device device = results.at(0).device();
    for (const Tensors& tensors : {inputs, outputs})
      for (const at::Tensor& t : tensors)
        TORCH_CHECK(t.device() == device && t.is_contiguous(), "standin_gloo takes contiguous tensors of one device");
    const c10::Stream stream = is_async ? stream_of(device) : current_stream(device.index());
    standin::wait(stream, here(current_stream(device.index())));
    Tensors in = on_the_host(inputs), out = on_the_host(outputs);
    for (size_t i = 0; i < in.size(); ++i)
      enqueue(stream, [from = as_task_sees(inputs[i]), to = in[i]] { to.copy_(from); });
    {
      std::lock_guard guard(mutex_);
      const uint32_t number = ++issued_;
      const Point start = enqueue(stream, [this, number] { board_.arrive(number); });
      items_.push_back({number, start, close_gate(stream), [on_host, in, out]() mutable { on_host(in, out)->wait(); }});
    }
    changed_.notify_all();
    for (size_t i = 0; i < results.size(); ++i)
      enqueue(stream, [from = outputs.empty() ? in[i] : out[i], to = as_task_sees(results[i])] { to.copy_(from); });
    Tensors used = inputs;
    used.insert(used.end(), outputs.begin(), outputs.end());
    auto queued = c10::make_intrusive<Queued>(rank_, type, stream, is_async ? used : Tensors{}, results);
    keep(queued);
    pass_time(stream);
    return queued;
  }

  static Tensors on_the_host(const Tensors& tensors) {
    Tensors made;
    for (const at::Tensor& t : tensors) made.push_back(at::empty(t.sizes(), t.options().device(c10::kCPU)));
    return made;
  }

  c10::Stream stream_of(c10::Device device) {
    auto found = streams_.find(device.index());
    if (found == streams_.end()) {
      const c10::impl::VirtualGuardImpl guard(kDevice);
      found = streams_.emplace(device.index(), guard.getNewStream(device)).first;
    }
    return found->second;
  }

  // As NCCL's watchdog: what nobody waits for is kept until it is done.
  void keep(const c10::intrusive_ptr<Queued>& queued) {
    std::erase_if(on_their_way_, [](const auto& work) { return work->isCompleted(); });
    on_their_way_.push_back(queued);
  }

  void work() {
    for (;;) {
      Item item;
      {
        std::unique_lock guard(mutex_);
        changed_.wait(guard, [&] { return ends_ || !items_.empty(); });
        if (items_.empty()) return;
        item = std::move(items_.front());
        items_.pop_front();
      }
      try {
        board_.wait_for(item.number);
        finish(item.start);
        item.run();
      } catch (const std::exception& error) {
        report(std::string("a collective: ") + error.what());
      }
      open_gate(item.gate);
    }
  }

  const c10::intrusive_ptr<c10d::Backend> on_host_;
  Board board_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::vector<c10::intrusive_ptr<Queued>> on_their_way_;
  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::deque<Item> items_;
  uint32_t issued_ = 0;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace
}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def(
      "collectives",
      [](const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Backend>& on_host) {
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<standin::Collectives>(store, on_host));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
