// Every operator becomes a task that runs the CPU's kernel late. What the host must know at once, shapes and strides of
// results, the meta kernel says. Operators without one, and those whose shapes depend on values, wait for their stream.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

#include "standin.h"

namespace standin {

// As a kernel does not, it keeps nothing alive.
at::Tensor as_task_sees(const at::Tensor& t) {
  const auto options = at::TensorOptions(t.scalar_type()).device(c10::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(shadow_of(t.const_data_ptr()), t.sizes(), t.strides(), options);
}

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

bool is_here(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

at::Tensor snapshot(const at::Tensor& t) {
  at::Tensor copy = t.detach().clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

c10::Stream stream_of(const at::Tensor& t) { return current_stream(t.device().index()); }

// ---- memory of tensors

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  const auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_generic(
      sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  const auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

at::Tensor empty_like_on(const at::Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
}

void reserve(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, t.itemsize(), t.storage_offset());
  if (t.storage().nbytes() < bytes) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), bytes);
  }
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  if (self.sizes() == sizes) return self;
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous, "standin: resize_ only to contiguous tensors");
  reserve(self, sizes, strides);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (strides.data() == nullptr || (strides.empty() && !sizes.empty())) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_none(at::Tensor& self) {
  at::Tensor none = at::empty({0}, self.options());
  return set_storage(self, none.storage(), 0, {0}, {});
}

void record_stream_of(at::Tensor& self, at::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// ---- copies

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  return (a.is_contiguous() && b.is_contiguous()) || (a.strides() == b.strides() && a.is_non_overlapping_and_dense());
}

void copy_up(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor target = as_task_sees(to);
  if (is_pinned(from.const_data_ptr()) && same_layout(from, to)) {  // reads the host's memory when it runs
    const void* start = from.const_data_ptr();
    const Point done = enqueue(
        stream_of(to), [start, bytes = from.nbytes(), out = target] { std::memcpy(out.mutable_data_ptr(), start, bytes); });
    record_pinned(start, done);
  } else {
    enqueue(stream_of(to), [source = snapshot(from), target] { target.copy_(source); });
  }
  if (!non_blocking) finish(here(stream_of(to)));
}

void copy_down(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor source = as_task_sees(from);
  if (non_blocking && is_pinned(to.const_data_ptr()) && same_layout(from, to)) {  // writes it when it runs
    void* start = to.mutable_data_ptr();
    const Point done = enqueue(
        stream_of(from), [start, bytes = to.nbytes(), source] { std::memcpy(start, source.const_data_ptr(), bytes); });
    record_pinned(start, done);
    return;
  }
  at::Tensor found = at::empty_strided(from.sizes(), from.strides(), source.options());
  finish(enqueue(stream_of(from), [source, found] { found.copy_(source); }));
  to.detach().copy_(found);
}

void copy_across(const at::Tensor& from, const at::Tensor& to) {
  const c10::Stream own = stream_of(from), other = stream_of(to);
  wait(own, here(other));
  enqueue(own, [source = as_task_sees(from), target = as_task_sees(to)] { target.copy_(source); });
  wait(other, here(own));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  const at::Tensor source = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (!is_here(source)) {
    copy_up(source, dst, non_blocking);
  } else if (!is_here(dst)) {
    copy_down(source, dst, non_blocking);
  } else {
    copy_across(source, dst);
  }
  pass_time(stream_of(is_here(dst) ? dst : source));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar item(const at::Tensor& self) {
  at::Tensor found = at::empty(self.sizes(), self.options().device(c10::kCPU));
  copy_down(self, found, false);
  return found.item();
}

// ---- all other operators

using Memo = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

at::Tensor once(Memo& memo, const at::Tensor& t, const std::function<at::Tensor(const at::Tensor&)>& make) {
  if (!t.defined()) return t;
  auto found = memo.find(t.unsafeGetTensorImpl());
  if (found == memo.end()) found = memo.emplace(t.unsafeGetTensorImpl(), make(t)).first;
  return found->second;
}

// The same arguments with other tensors, and with another device.
IValue convert(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& make, c10::Device device) {
  if (value.isTensor()) return make(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorVector()) out.push_back(make(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
      out.push_back(t && t->defined() ? std::optional<at::Tensor>(make(*t)) : std::nullopt);
    }
    return out;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) return device;
  if (value.isGenerator()) return IValue();
  return value;
}

struct Call {
  const c10::OperatorHandle& op;
  std::vector<IValue> arguments;
  c10::Device device;
  std::optional<at::Generator> generator;
  bool random;

  Call(const c10::OperatorHandle& given, Stack* stack)
      : op(given),
        arguments(stack->end() - static_cast<int64_t>(given.schema().arguments().size()), stack->end()),
        device(kDevice, -1),
        random(given.hasTag(at::Tag::nondeterministic_seeded)) {
    stack->erase(stack->end() - static_cast<int64_t>(arguments.size()), stack->end());
    std::optional<c10::Device> named;
    for (const IValue& value : arguments) {
      if (value.isDevice()) named = value.toDevice();
      if (value.isGenerator()) generator = value.toGenerator(), random = true;
      for_each_tensor(value, [&](const at::Tensor& t) {
        if (!is_here(t)) return;
        TORCH_CHECK(!device.has_index() || device == t.device(), op.operator_name(), ": tensors are on ", device, " and ",
                    t.device());
        device = t.device();
      });
    }
    if (!device.has_index()) device = named && named->has_index() ? *named : c10::Device(kDevice, current_device());
  }

  static void for_each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
    convert(value, [&](const at::Tensor& t) { return visit(t), t; }, c10::kCPU);
  }

  bool writes(size_t i) const {
    const auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  // Whether the results' shapes are known before the operator runs.
  bool is_foreseen() const {
    if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return false;
    for (const auto& result : op.schema().returns()) {
      const auto kind = result.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
    }
    return !picks_by_mask() && op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  }

  bool picks_by_mask() const {
    bool found = false;
    if (op.schema().name() != "aten::index") return false;
    for_each_tensor(arguments[1], [&](const at::Tensor& t) { found = found || t.scalar_type() == at::kBool; });
    return found;
  }

  // The arguments that the CPU's kernel gets when it runs.
  Stack for_the_task() const {
    Memo memo;
    Stack out;
    const std::string& name = op.schema().name();
    const bool takes_host_indices = name.find("index") != std::string::npos;
    for (size_t i = 0; i < arguments.size(); ++i) {
      out.push_back(convert(arguments[i], [&](const at::Tensor& t) {
        return once(memo, t, [&](const at::Tensor& own) {
          if (is_here(own)) return as_task_sees(own);
          TORCH_CHECK(!writes(i) && (own.dim() == 0 || takes_host_indices), name, ": expected all tensors on ", device,
                      ", got one on ", own.device());
          return snapshot(own);
        });
      }, c10::kCPU));
    }
    return out;
  }

  // What the meta kernel makes of the arguments; the shapes of outputs that it changes are changed too.
  Stack foresee() const {
    Memo memo;
    Stack out;
    for (const IValue& value : arguments) {
      out.push_back(convert(value, [&](const at::Tensor& t) {
        return once(memo, t, [](const at::Tensor& own) {
          if (!is_here(own) && own.dim() == 0) return own;  // such as the number in ``tensor + 1``
          return at::Tensor(at::detail::empty_strided_meta(
              own.sizes(), own.strides(), own.scalar_type(), std::nullopt, c10::Device(c10::kMeta), std::nullopt));
        });
      }, c10::Device(c10::kMeta)));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &out);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!writes(i)) continue;
      for_each_tensor(arguments[i], [&](const at::Tensor& t) {
        if (!is_here(t)) return;
        const at::Tensor& meta = memo.at(t.unsafeGetTensorImpl());
        if (meta.sizes() == t.sizes()) return;
        reserve(t, meta.sizes(), meta.strides());
        t.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
      });
    }
    return out;
  }

  // The meta kernel of layer_norm promises mean and deviation as CUDA's makes them: in float32.
  at::Tensor as_cpu_would(const at::Tensor& meta) const {
    return op.schema().name() == "aten::native_layer_norm" ? meta.to(arguments[0].toTensor().scalar_type()) : meta;
  }

  // The argument that a result is, if it is one.
  const IValue* argument_of_result(size_t i) const {
    const auto* alias = op.schema().returns()[i].alias_info();
    if (!alias) return nullptr;
    for (size_t j = 0; j < arguments.size(); ++j) {
      const auto* own = op.schema().arguments()[j].alias_info();
      if (own && own->isWrite() && own->beforeSet() == alias->beforeSet()) return &arguments[j];
    }
    TORCH_CHECK(false, "standin: ", op.operator_name(), " returns a view");
  }
};

// As the CPU's kernel of aten::native_dropout, which takes no generator.
void dropout(Stack& stack, const at::Generator& generator) {
  const at::Tensor input = stack[0].toTensor();
  const double keep = 1 - stack[1].toDouble();
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(keep, generator);
  stack = {input.mul(mask).mul_(keep == 0 ? 0 : 1 / keep), mask};
}

// Run the CPU's kernel. Its random numbers come from a generator of its own: the default one is the host's, whose
// threads go on meanwhile.
void run_on_cpu(const c10::OperatorHandle& op, Stack& stack, std::optional<uint64_t> seed) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset);
  const bool drops = op.schema().name() == "aten::native_dropout";
  const bool trains = drops && (stack[2].isNone() || stack[2].toBool());
  if (seed && (trains || !drops)) {
    const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(*seed);
    if (trains) return dropout(stack, generator);
    const auto place = op.schema().argumentIndexWithName("generator");
    TORCH_CHECK(place, "standin: ", op.operator_name(), " is random and takes no generator");
    stack[*place] = generator;
  }
  op.callBoxed(&stack);
}

// Wait for the stream and compute at once, as operators do whose shapes or results the host needs.
void compute_now(const Call& call, Stack* stack, std::optional<uint64_t> seed) {
  Stack results = call.for_the_task();
  const c10::Stream stream = current_stream(call.device.index());
  finish(enqueue(stream, [&] { run_on_cpu(call.op, results, seed); }));
  for (size_t i = 0; i < results.size(); ++i) {
    if (const IValue* own = call.argument_of_result(i)) {
      stack->push_back(*own);
      continue;
    }
    stack->push_back(convert(results[i], [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      at::Tensor out = empty_like_on(t, call.device);
      enqueue(stream, [target = as_task_sees(out), t] { target.copy_(t); });
      return out;
    }, call.device));
  }
}

void compute_late(const Call& call, Stack* stack, std::optional<uint64_t> seed) {
  const Stack foreseen = call.foresee();
  std::vector<std::pair<size_t, std::vector<at::Tensor>>> targets;  // by number of the result
  for (size_t i = 0; i < foreseen.size(); ++i) {
    if (const IValue* own = call.argument_of_result(i)) {
      stack->push_back(*own);
      continue;
    }
    std::vector<at::Tensor> made;
    stack->push_back(convert(foreseen[i], [&](const at::Tensor& meta) {
      at::Tensor out = meta.defined() ? empty_like_on(call.as_cpu_would(meta), call.device) : meta;
      made.push_back(out.defined() ? as_task_sees(out) : out);
      return out;
    }, call.device));
    targets.emplace_back(i, std::move(made));
  }
  enqueue(current_stream(call.device.index()),
          [op = call.op, seed, arguments = call.for_the_task(), targets = std::move(targets)] {
    Stack results = arguments;
    run_on_cpu(op, results, seed);
    for (const auto& [number, outs] : targets) {
      auto target = outs.begin();
      Call::for_each_tensor(results[number], [&](const at::Tensor& found) {
        const at::Tensor& out = *target++;
        if (!out.defined() || !found.defined()) return;
        TORCH_CHECK(out.sizes() == found.sizes(), "standin: ", op.operator_name(), " made ", found.sizes(),
                    ", its meta kernel said ", out.sizes());
        out.copy_(found);
      });
    }
  });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const Call call(op, stack);
  const c10::DeviceGuard guard(call.device);
  const auto seed = call.random ? std::optional(draw_seed(call.generator, call.device.index())) : std::nullopt;
  if (call.is_foreseen()) {
    compute_late(call, stack, seed);
  } else {
    compute_now(call, stack, seed);
  }
  pass_time(current_stream(call.device.index()));
}

int64_t attention_kind(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_none);
  m.impl("record_stream", &record_stream_of);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  // Else torch computes it by smaller operators, which round in another way than the CPU's kernel.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::attention_kind)
}  // namespace at::native
