"""Every private name of torch and transformers that Grass uses; they may change with any release.

Each function says what it is for and what Grass cannot do without it. :data:`IN_PLACE` has those that cannot be wrapped
and are written where they are used. ``tests/test_private_names.py`` tries each name, and fails where a version lacks
one or gives it another meaning, or where another file uses a private name that is not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.distributed import is_available
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _foreach_utils, _python_dispatch, _pytree
from torch.utils.hooks import RemovableHandle

IN_PLACE = {
    "_parameters": "A module's own table of parameters. For: to exchange one, and to read past __getattr__, which is "
    "slow. Without it: register_parameter and named_parameters(recurse=False), which take longer in each step.",
    "_modules": "A module's own table of submodules. For: the active rows of experts. Without it: named_children().",
    "_buffers": "A module's own table of buffers. For: codes of 8 bits. Without it: register_buffer and named_buffers.",
    "_apply": "The method behind to(), half() and cuda(). For: layers that are told when they move, and streamed units "
    "that stay on the host. Without it: a moved model would train old rows.",
    "_save_to_state_dict": "The method by which a module saves its own tensors. For: state dicts of the plain model. "
    "Without it: checkpoints would hold active rows and codes under names that plain models do not have.",
    "_load_from_state_dict": "The method by which a module loads its own tensors. For: active rows that follow a "
    "loaded weight. Without it: they would overwrite it in the next step.",
    "_version": "A tensor's count of changes in place. For: noticing that a weight was changed from outside. Without "
    "it: stale copies would be used, on the device and on the host.",
    "_prepare_inputs": "A Trainer's way of moving a batch to its device. For: timing a Trainer's steps before "
    "training. Without it: deal='auto' would have to move batches itself.",
    "_foreach_add_": "For, as all of _foreach_*: one call for many tensors. Without it: a call for each, which takes "
    "longer.",
    "_foreach_addcdiv_": "See _foreach_add_.",
    "_foreach_addcmul_": "See _foreach_add_.",
    "_foreach_copy_": "See _foreach_add_.",
    "_foreach_div_": "See _foreach_add_.",
    "_foreach_lerp_": "See _foreach_add_.",
    "_foreach_mul_": "See _foreach_add_.",
    "_foreach_neg": "See _foreach_add_.",
}
"""Names that a subclass overrides, or whose wrapper would be called for every tensor of every step."""

FakeTensor = fake_tensor.FakeTensor
"""For: an error that says why a step on tensors without contents cannot choose rows. Without it: an obscure error."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""For: the planner, which traces models of any size. Without it: no ``grass.memory`` of a model of one's own."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""For: counting live bytes of a traced model. Without it: no ``grass.memory`` of a model of one's own."""

is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""For: leaving weights alone that hold other tensors, as torchao's do. Without it: they would be converted wrongly."""

tree_flatten = _pytree.tree_flatten
"""For: the tensors in any inputs and outputs of a streamed unit. Without it: tuples and dicts only."""

tree_unflatten = _pytree.tree_unflatten
"""See :func:`tree_flatten`."""

tree_leaves = _pytree.tree_leaves
"""For: the tensors in any result of a traced operation. Without it: no ``grass.memory`` of a model of one's own."""

NO_BACKWARD = -1
"""What :func:`running_backward` returns outside of backward."""


def running_backward() -> int:
    """The number of the backward pass that runs in this thread.

    For: telling a recomputed forward from a first one, and one backward pass from the next. Without it: neither
    streaming nor ``step_in_backward``.
    """
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs in this thread has ended without an error.

    For: waiting for gradients on their way to the host, and noticing a backward pass that failed. Without it: neither
    streaming nor ``step_in_backward``.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # untyped in torch
    engine.queue_callback(callback)


def is_saved_by_its_maker(x: Tensor) -> bool:
    """Whether the operation that computed ``x``, which may be a view of its result, keeps that for backward, as ReLU.

    For: layers that need some columns of their input, which save the whole where it is kept anyway. Without it: nets
    with ReLU, Tanh or Sigmoid would save these columns besides.
    """
    maker = (x if x._base is None else x._base).grad_fn
    return maker is not None and hasattr(type(maker), "_saved_result")


def check_accumulates(node: Any) -> None:
    """Raise ``RuntimeError`` if a node that accumulates a gradient belongs to inputs of ``torch.autograd.grad``.

    For: returning gradients of streamed units that ``torch.autograd.grad`` asks for. Without it: these would be sent
    to ``.grad`` instead.
    """
    torch._C._will_engine_execute_node(node)


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """The hooks of ``register_hook`` and ``register_post_accumulate_grad_hook`` on a tensor.

    For: giving autograd the gradient of a streamed parameter that has hooks; refusing a second ``step_in_backward``.
    Without it: such hooks would be skipped, and two optimizers would step one parameter.
    """
    both: Any = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [hook for hooks in both for hook in (hooks or {}).values()]


def set_steps_with_scaler(optimizer: Optimizer, value: bool) -> None:
    """Let ``GradScaler`` call ``step()`` also where a gradient overflowed, with ``found_inf`` set on the optimizer.

    For: an error where ``step_in_backward`` meets a ``GradScaler``. Without it: steps by scaled gradients.
    """
    if value:
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    else:
        del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]


def run_first(optimizer: Optimizer, hook: RemovableHandle) -> None:
    """Let a step post-hook run before those that were registered earlier.

    For: other hooks of an attached optimizer, which see weights as they are after the step and the user's learning
    rates. Without it: hooks from before ``grass.attach`` see those of the middle of a step.
    """
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(hook.id, last=False)


def devices_of_fused_kernels() -> list[str]:
    """Types of devices on which torch has a fused AdamW.

    For: parameters at full rank, fused where torch can. Without it: foreach, which is slower.
    """
    return list(_foreach_utils._get_fused_kernels_supported_devices())


def keeps_identity(before: Tensor, after: Tensor) -> bool:
    """Whether ``module.to()`` changes a parameter's data, instead of the parameter, to get from one to the other.

    For: parameters that stay the same objects when a streamed model moves. Without it: the optimizer would step the
    old ones.
    """
    return bool(torch._has_compatible_shallow_copy_type(before, after))


def assert_async(condition: Tensor, message: str) -> None:
    """Fail where a tensor of one bool is false, without waiting for the device.

    For: token ids out of range in 2D tensor parallelism. Without it: the host would wait in each forward.
    """
    torch._assert_async(condition, message)


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x weight^T`` by oneDNN.

    For: faster float32 products on x86 CPUs. Without it: MKL's.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def has_onednn_linear() -> bool:
    """Whether this build of torch has it. See :func:`onednn_linear`."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that two views of one storage share, also where the storage has no memory.

    For: counting live bytes of a traced model. Without it: no ``grass.memory`` of a model of one's own.
    """
    return int(storage._cdata)


def is_in_ddp_forward() -> bool:
    """Whether a ``DistributedDataParallel`` computes its forward now.

    For: an error where streaming meets DDP. Without it: DDP would wait for gradients that never arrive.
    """
    return DistributedDataParallel._active_ddp_module is not None


def parameters_of_ddp(ddp: Any) -> list[Tensor]:
    """The parameters whose gradients a ``DistributedDataParallel`` reduces.

    For: finding the wrapper of a model, see :func:`is_joining`. Without it: see there.
    """
    return list(ddp._module_parameters)


def is_joining(ddp: Any) -> bool:
    """Whether ``ddp.join()`` was entered, also if it has ended.

    For: an error in ``DDP.join()``. Without it: ranks would wait for each other for ever.
    """
    return bool(ddp._join_config.enable)


def device_types_of(group: Any) -> list[torch.device]:
    """Types of devices whose tensors a process group takes.

    For: comparing settings by tensors in host memory. Without it: a second group, also where gloo is there already.
    """
    return list(group._device_types)


def functional_collectives() -> Any:
    """``torch.distributed._functional_collectives``, imported when it is first asked for.

    For: collectives in 2D tensor parallelism whose results are waited for by their first reader. Without it: no
    overlap of communication and computation.
    """
    from torch.distributed import _functional_collectives

    return _functional_collectives


def is_parallelized(module: nn.Module) -> bool:
    """Whether ``parallelize_module`` has distributed a module.

    For: telling tensor parallelism from FSDP2. Without it: an error for either would name both.
    """
    return bool(getattr(module, "_distribute_module_applied", False))


def prefetches(module: nn.Module) -> bool:
    """Whether ``set_modules_to_forward_prefetch`` was called on a module of FSDP2.

    For: offload, which waits for shards before the module that gathers them. Without it: it would wait for all shards
    in the first module.
    """
    get_state: Any = getattr(module, "_get_fsdp_state", None)
    return get_state is not None and bool(get_state()._states_to_forward_prefetch)


def gathered_by_fsdp() -> dict[int, Tensor]:
    """The whole parameters that modules of FSDP2 have computed with, by the ``id`` of the shard.

    For: counting a step as a change of the whole too. Without it: backward through an earlier graph would
    use stepped weights without an error.
    """
    if not is_available():
        return {}
    from torch.distributed._composable_state import _module_state_mapping

    states: list[Any] = [reference() for reference in list(_module_state_mapping.values())]
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    every = [parameter for group in groups for parameter in group.fsdp_params]
    return {id(p.sharded_param): p._unsharded_param for p in every if hasattr(p, "_unsharded_param")}


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or ``torch.compile`` returned the module.

    For: hooks of offload outside of compiled code, and an error in ``grass.stream``. Without it: compiled code would
    not wait for weights from the host.
    """
    return has_compiled_call(module) or hasattr(module, "_orig_mod")


def has_compiled_call(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called. See :func:`is_compiled`."""
    return getattr(module, "_compiled_call_impl", None) is not None


def without_compile(module: Any) -> Any:
    """The module that ``torch.compile`` was given, or the module itself.

    For: names of an averaged model. Without it: averages of compiled models are refused.
    """
    return getattr(module, "_orig_mod", module)


def experts_implementation(config: Any) -> str | None:
    """How experts of transformers compute, in a configuration.

    For: their forward with active rows. Without it: transformers' mixtures cannot be converted.
    """
    found: str | None = config._experts_implementation
    return found


def set_experts_implementation(config: Any, name: str) -> None:
    """Choose how experts of transformers compute. See :func:`experts_implementation`."""
    config._experts_implementation = name


def has_gate_of_experts(module: nn.Module) -> bool:
    """Whether this is a module of transformers' experts.

    For: recognising them. Without it: transformers' mixtures cannot be converted.
    """
    return hasattr(module, "_apply_gate")


def apply_gate(module: Any, x: Tensor) -> Tensor:
    """The gated activation of transformers' experts. See :func:`has_gate_of_experts`."""
    gated: Tensor = module._apply_gate(x)
    return gated


def attends_by_interface(kind: Any) -> bool:
    """Whether attention of a class of transformers' models can be exchanged, and can be scaled-dot-product attention.

    For: the planner, which traces attention without a mask. Without it: it would count a mask that training has not.
    """
    return bool(kind._supports_sdpa and kind._supports_attention_backend)


def set_attention(config: Any, name: str) -> None:
    """Choose the attention of a configuration of transformers. See :func:`attends_by_interface`."""
    config._attn_implementation = name


def checkpoints_with_cache(module: nn.Module) -> bool:
    """Whether a block of transformers takes a cache where its forward is computed again in backward.

    For: streaming such blocks. Without it: their caches would be dropped.
    """
    return bool(getattr(module, "_can_checkpoint_with_cache", False))


def around_waits_of_fsdp(model: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what FSDP2 does between the computations of its modules, which waits for other ranks.

    For: times of one rank under FSDP2. Without it: ``grass.distributed.deal`` could not tell the ranks apart there,
    because all would seem as slow as the slowest.
    """
    waits = ("pre_forward", "pre_backward", "post_backward", "finalize_backward", "unshard", "wait_for_unshard")
    states = (ask() for module in model.modules() if (ask := getattr(module, "_get_fsdp_state", None)) is not None)
    for group in (group for state in states for group in state._fsdp_param_groups):
        for name in waits:
            setattr(group, name, around(getattr(group, name)))
