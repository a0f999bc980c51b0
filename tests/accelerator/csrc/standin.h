// A stand-in accelerator for tests: its parts, and what they owe each other.
//
// queues.cpp    streams hold tasks; they run late, in an order drawn from a seed
// memory.cpp    device memory that the host cannot touch, and pinned host memory
// device.cpp    devices, current streams, events and generators, as torch asks for them
// operators.cpp every operator becomes a task; copies; views
// collectives.cpp a process group's part for tensors of the device
// module.cpp    what Python calls through ctypes

#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace standin {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr uint8_t kPoison = 0xFF;  // NaN in every floating-point type, -1 in integers

// Guards all state of the stand-in. Who holds it must not wait for tasks. The worker holds it while a task runs, and needs no other lock.
std::recursive_mutex& lock();

// ---- queues.cpp

// How far a stream has come: reached when so many of its tasks are done.
struct Point {
  c10::StreamId stream = 0;
  c10::DeviceIndex device = 0;
  uint64_t ticket = 0;
  bool reached() const;
};

// Tasks behind it in a stream run once the host has opened it.
struct Gate {
  bool is_open = false;
};

Point enqueue(c10::Stream stream, std::function<void()> task);
Point here(c10::Stream stream);
void wait(c10::Stream stream, Point point);  // later tasks of the stream run after the point
void finish(Point point);                    // block the host; raises if a task has failed
void finish_device(c10::DeviceIndex device);
std::shared_ptr<Gate> close_gate(c10::Stream stream);
void open_gate(const std::shared_ptr<Gate>& gate);
void report(const std::string& fault);  // as a task that has failed
void nudge();                        // run a few tasks
void pass_time(c10::Stream stream);  // perhaps; call it after queueing, without the lock
void set_seed(uint64_t seed);
void set_eager(bool eager);  // run every task at once: nothing is late any more
int64_t take_fault(char* text, int64_t size);
uint64_t tasks_run();

// ---- memory.cpp

void* shadow_of(const void* device_pointer);  // the address at which tasks read and write this memory
bool is_device_pointer(const void* pointer, c10::DeviceIndex* device);
void record_stream(const c10::DataPtr& data, c10::Stream stream);
bool is_pinned(const void* pointer);
void record_pinned(const void* pointer, Point point);  // do not reuse this pinned block before the point
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
void set_budget(c10::DeviceIndex device, int64_t bytes);
int64_t pinned_bytes();

// ---- operators.cpp

at::Tensor as_task_sees(const at::Tensor& t);  // on the CPU, at the memory's other address; keeps nothing alive

// ---- device.cpp

c10::Stream current_stream(c10::DeviceIndex device);
c10::DeviceIndex current_device();
const at::Generator& default_generator(c10::DeviceIndex device);
uint64_t draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

}  // namespace standin
