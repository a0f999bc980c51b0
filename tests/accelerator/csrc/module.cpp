// What Python calls through ctypes.

#include <cstring>

#include "standin.h"

extern "C" {

void standin_seed_order(uint64_t seed) { standin::set_seed(seed); }
void standin_eager(bool eager) { standin::set_eager(eager); }
void standin_budget(int device, int64_t bytes) { standin::set_budget(static_cast<c10::DeviceIndex>(device), bytes); }
int64_t standin_pinned_bytes() { return standin::pinned_bytes(); }
uint64_t standin_tasks_run() { return standin::tasks_run(); }
int64_t standin_take_fault(char* text, int64_t size) { return standin::take_fault(text, size); }

void standin_get_random(int device, uint64_t* state) {
  const auto& generator = standin::default_generator(static_cast<c10::DeviceIndex>(device));
  state[0] = generator.current_seed();
  state[1] = generator.get_offset();
}

void standin_set_random(int device, const uint64_t* state) {
  at::Generator generator = standin::default_generator(static_cast<c10::DeviceIndex>(device));
  generator.set_current_seed(state[0]);
  generator.set_offset(state[1]);
}

}  // extern "C"
