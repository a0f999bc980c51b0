// Streams hold tasks. Nothing runs when it is queued. When the host waits for a point, the worker runs tasks until the
// point is reached: of which streams, a seed decides, within what waits allow.

#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "standin.h"

namespace standin {
namespace {

struct Task {
  std::function<void()> run;
  std::optional<Point> after;  // a wait: does nothing, but only after this point
  std::shared_ptr<Gate> gate;  // likewise, but only once this is open
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t queued = 0, done = 0;
};

using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

enum class Order { kNeeded, kAny, kOthersFirst };

// What a thread of the host waits for.
struct Request {
  Point goal;
  Order order;
  bool is_done = false;
};

struct Scheduler {
  std::map<Key, Queue> queues;
  std::mt19937_64 random{0};
  bool eager = false;
  uint64_t run = 0;
  std::string fault;

  std::list<Request*> requests;
  bool nudged = false;
  std::condition_variable_any wake, answered;
  bool started = false;

  Queue& of(const Point& p) { return queues[{p.device, p.stream}]; }
  uint64_t draw(uint64_t below) { return random() % below; }

  bool runnable(const Queue& q) {
    if (q.tasks.empty()) return false;
    const Task& head = q.tasks.front();
    return head.gate ? head.gate->is_open : !head.after || head.after->reached();
  }

  std::vector<Queue*> all_runnable() {
    std::vector<Queue*> found;
    for (auto& [key, queue] : queues)
      if (runnable(queue)) found.push_back(&queue);
    return found;
  }

  void run_head(Queue& q) {
    Task task = std::move(q.tasks.front());
    q.tasks.pop_front();
    try {
      if (task.run) task.run();
    } catch (const c10::Error& error) {
      if (fault.empty()) fault = error.what_without_backtrace();
    } catch (const std::exception& error) {
      if (fault.empty()) fault = error.what();
    }
    ++run;
    ++q.done;
  }

  // The queue whose head must run for this one to go on; none if that is a closed gate.
  Queue* needed(Queue& q) {
    Queue* found = &q;
    while (!runnable(*found)) {
      if (found->tasks.front().gate) return nullptr;
      found = &of(*found->tasks.front().after);
    }
    return found;
  }

  Queue* choose(Queue& goal, Order order) {
    Queue* must = needed(goal);
    if (order == Order::kNeeded) return must;
    auto found = all_runnable();
    if (order == Order::kOthersFirst && found.size() > 1) std::erase(found, must);
    return found.empty() ? nullptr : found[draw(found.size())];
  }

  // Run tasks until the goal is reached or behind a closed gate; whether any ran.
  bool serve(Request& request) {
    Queue& goal = of(request.goal);
    bool ran = false;
    while (!(request.is_done = goal.done >= request.goal.ticket)) {
      Queue* next = choose(goal, request.order);
      if (!next) break;
      run_head(*next);
      ran = true;
    }
    return ran || request.is_done;
  }

  // Work on what is asked first of all that can go on; whether there was any.
  bool serve_one() {
    for (Request* request : requests) {
      if (!serve(*request)) continue;
      if (request->is_done) {
        requests.remove(request);
        answered.notify_all();
      }
      return true;
    }
    return false;
  }

  // One stream runs ahead of the others.
  void run_a_few() {
    auto found = all_runnable();
    if (found.empty()) return;
    Queue& queue = *found[draw(found.size())];
    for (uint64_t left = 1 + draw(16); left > 0 && runnable(queue); --left) run_head(queue);
  }

  void work() {
    const c10::InferenceMode all;  // tasks write tensors that were made in it too
    std::unique_lock guard(lock());
    for (;;) {
      if (nudged) {
        run_a_few();
        nudged = false;
        answered.notify_all();
      } else if (!serve_one()) {
        wake.wait(guard);
      }
    }
  }

  // Let the worker do it: its thread has none of the modes and guards of the caller's.
  void start() {
    if (started) return;
    std::thread([this] { work(); }).detach();
    started = true;
  }

  void reach(const Point& point) {
    std::unique_lock guard(lock());
    start();
    Request request{point, static_cast<Order>(draw(3))};
    requests.push_back(&request);
    wake.notify_one();
    answered.wait(guard, [&] { return request.is_done; });
  }

  void run_a_few_now() {
    std::unique_lock guard(lock());
    start();
    nudged = true;
    wake.notify_one();
    answered.wait(guard, [&] { return !nudged; });
  }
};

Scheduler& scheduler() {
  static auto* instance = new Scheduler;  // outlives every thread
  return *instance;
}

void check_fault() {
  TORCH_CHECK(scheduler().fault.empty(), "standin: an operator failed on the device: ", scheduler().fault);
}

}  // namespace

std::recursive_mutex& lock() {
  static auto* instance = new std::recursive_mutex;
  return *instance;
}

bool Point::reached() const { return scheduler().of(*this).done >= ticket; }

Point here(c10::Stream stream) {
  std::lock_guard guard(lock());
  Point point{stream.id(), stream.device_index(), 0};
  point.ticket = scheduler().of(point).queued;
  return point;
}

static Point push(c10::Stream stream, Task task) {
  std::lock_guard guard(lock());
  Point point{stream.id(), stream.device_index(), 0};
  Queue& queue = scheduler().of(point);
  queue.tasks.push_back(std::move(task));
  point.ticket = ++queue.queued;
  return point;
}

Point enqueue(c10::Stream stream, std::function<void()> task) { return push(stream, {std::move(task)}); }

void wait(c10::Stream stream, Point point) {
  if (Key{point.device, point.stream} != Key{stream.device_index(), stream.id()}) push(stream, {nullptr, point});
}

std::shared_ptr<Gate> close_gate(c10::Stream stream) {
  auto gate = std::make_shared<Gate>();
  push(stream, {nullptr, std::nullopt, gate});
  return gate;
}

void open_gate(const std::shared_ptr<Gate>& gate) {
  std::lock_guard guard(lock());
  gate->is_open = true;
  scheduler().wake.notify_one();
}

void report(const std::string& fault) {
  std::lock_guard guard(lock());
  if (scheduler().fault.empty()) scheduler().fault = fault;
}

void finish(Point point) {
  {
    std::lock_guard guard(lock());
    if (point.reached()) {
      check_fault();
      return;
    }
  }
  scheduler().reach(point);
  std::lock_guard guard(lock());
  check_fault();
}

void finish_device(c10::DeviceIndex device) {
  std::vector<Point> points;
  {
    std::lock_guard guard(lock());
    for (auto& [key, queue] : scheduler().queues)
      if (key.first == device) points.push_back({key.second, key.first, queue.queued});
  }
  for (const Point& point : points) finish(point);
}

void nudge() {
  scheduler().run_a_few_now();
}

void pass_time(c10::Stream stream) {
  bool few = false, all = false;
  {
    std::lock_guard guard(lock());
    all = scheduler().eager;
    few = scheduler().draw(32) == 0;
  }
  if (all) {
    finish(here(stream));
  } else if (few) {
    nudge();
  }
}

void set_seed(uint64_t seed) {
  std::lock_guard guard(lock());
  scheduler().random.seed(seed);
}

void set_eager(bool eager) {
  std::lock_guard guard(lock());
  scheduler().eager = eager;
}

int64_t take_fault(char* text, int64_t size) {
  std::lock_guard guard(lock());
  std::string& fault = scheduler().fault;
  const int64_t found = static_cast<int64_t>(fault.size());
  std::strncpy(text, fault.c_str(), size - 1);
  text[size - 1] = 0;
  fault.clear();
  return found;
}

uint64_t tasks_run() {
  std::lock_guard guard(lock());
  return scheduler().run;
}

}  // namespace standin
