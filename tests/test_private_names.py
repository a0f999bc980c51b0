"""Private names of torch and transformers: each still means what Grass takes it for, and no other file uses one."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from grass import private_names
from tests.distributed.world import in_own_process

ROOT = Path(__file__).parents[1]
FILE = ROOT / "grass" / "private_names.py"
OF_PYTHON = {"_asdict", "_replace", "_fields", "_exit", "_inheriting", "_reconstructor"}
OF_OTHERS = {"_cache_pos_arg_names"}  # torchtitan
NAMES = [
    node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id
    for node in ast.parse(FILE.read_text()).body
    if isinstance(node, ast.FunctionDef | ast.Assign)
]


@functools.cache
def sources():
    """Every other file of the package, parsed."""
    paths = [path for folder in ("grass", "triton_kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in paths if path != FILE}


def is_private(name):
    return name.startswith("_") and not name.startswith(("__", "_grass_")) and name != "_"


def own_names(trees):
    """Private names that files define: functions, classes, variables, attributes, and keys of dicts."""
    own = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Dict):
            own |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return own


def private_names_in(tree):
    """Private names that a file reads: imports, attributes, and strings that are such a name."""
    formatted = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in formatted:
            yield from [node.value] if node.value.isidentifier() and is_private(node.value) else []
        elif isinstance(node, ast.ImportFrom):
            yield from (part for part in (node.module or "").split(".") if is_private(part))
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split(".") if is_private(part))


def test_no_other_file_uses_a_private_name():
    allowed = own_names(sources().values()) | OF_PYTHON | OF_OTHERS | set(private_names.IN_PLACE)
    found = {path.name: sorted(set(private_names_in(tree)) - allowed) for path, tree in sources().items()}
    assert not {name: names for name, names in found.items() if names}


def test_a_private_name_elsewhere_would_be_found():
    code = "import torch._dynamo\nfrom torch._C import x\ntorch._weight_norm(1)\nhasattr(m, '_is_hf_initialized')"
    assert {*private_names_in(ast.parse(code))} == {"_dynamo", "_C", "_weight_norm", "_is_hf_initialized"}


def test_names_in_place_are_used_and_all_names_of_the_file_too():
    text = "".join(path.read_text() for path in sources())
    assert [name for name in private_names.IN_PLACE if not re.search(rf"\b{name}\b", text)] == []
    assert [name for name in NAMES if name != "IN_PLACE" and not re.search(rf"\b{name}\b", text)] == []


def test_every_name_says_what_it_is_for_and_has_a_test():
    """Or refers to one that says it."""
    body = ast.parse(FILE.read_text()).body
    meanings = dict(private_names.IN_PLACE)
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            meanings[node.name] = ast.get_docstring(node)
        elif isinstance(node, ast.Assign):
            meanings[node.targets[0].id] = after.value.value
    del meanings["IN_PLACE"], meanings["NO_BACKWARD"]
    for name, meaning in meanings.items():
        assert ("For" in meaning and "Without it: " in meaning.replace("\n", " ")) or "See " in meaning, name
    tests = Path(__file__).read_text()
    assert [name for name in meanings if not re.search(rf"[.\"]{name}\b|\bdef test_\w*{name}", tests)] == []


@pytest.mark.parametrize("table", ["_parameters", "_modules", "_buffers"])
def test_tables_of_a_module(table):
    module = nn.BatchNorm1d(3)
    module.inner = nn.Linear(3, 3)
    public = {
        "_parameters": dict(module.named_parameters(recurse=False)),
        "_modules": dict(module.named_children()),
        "_buffers": dict(module.named_buffers(recurse=False)),
    }[table]
    held = getattr(module, table)
    assert type(held) is dict
    assert held.keys() == public.keys()
    name = next(iter(held))
    held[name] = None  # an entry can be exchanged
    assert getattr(module, name) is None


def test_methods_that_layers_override():
    called = []

    class Layer(nn.Linear):
        def _apply(self, fn, recurse=True):
            called.append("_apply")
            return super()._apply(fn, recurse)

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            called.append("_save_to_state_dict")
            super()._save_to_state_dict(destination, prefix, keep_vars)

        def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
            called.append("_load_from_state_dict")
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    model = nn.Sequential(Layer(2, 2))
    model.load_state_dict(model.state_dict())
    model.half()
    assert called == ["_save_to_state_dict", "_load_from_state_dict", "_apply"]
    assert model[0].weight.dtype == torch.float16


def test_prepare_inputs_of_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(nn.Linear(2, 2), arguments)
    prepared = trainer._prepare_inputs({"x": torch.ones(2)})
    assert torch.equal(prepared["x"], torch.ones(2))
    assert prepared["x"].device == arguments.device


def test_version_counts_changes_in_place():
    weight = nn.Parameter(torch.zeros(2))
    before = weight._version
    with torch.no_grad():
        weight.add_(1)
    assert weight._version == before + 1
    weight.data.add_(1)
    assert weight._version == before + 1


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("_foreach_add_", (2.0,), 3.0),
        ("_foreach_addcdiv_", ([torch.tensor([6.0])], [torch.tensor([3.0])], -1.0), -1.0),
        ("_foreach_addcmul_", ([torch.tensor([2.0])], [torch.tensor([3.0])], 0.5), 4.0),
        ("_foreach_copy_", ([torch.tensor([5.0])],), 5.0),
        ("_foreach_div_", ([4.0],), 0.25),
        ("_foreach_lerp_", ([torch.tensor([3.0])], 0.5), 2.0),
        ("_foreach_mul_", (0.5,), 0.5),
    ],
)
def test_foreach(name, arguments, expected):
    values = [torch.tensor([1.0])]
    getattr(torch, name)(values, *arguments)
    assert values[0].item() == expected


def test_foreach_neg():
    assert torch._foreach_neg([torch.tensor([1.0])])[0].item() == -1


def test_fake_tensors():
    with private_names.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(1 << 50)  # more than any machine has
    assert isinstance(fake, private_names.FakeTensor)
    keys = {private_names.storage_key(t.untyped_storage()) for t in (fake, fake[:1])}
    assert keys == {private_names.storage_key(fake.untyped_storage())}


def test_dispatch_mode():
    seen = []

    class Seen(private_names.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.ones(2).mul(2)
    assert [str(func).split(".")[1] for func in seen] == ["ones", "mul"]


def test_is_traceable_wrapper_subclass():
    quantised = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    assert not private_names.is_traceable_wrapper_subclass(model[0].weight)
    quantised.quantize_(model, quantised.Int8WeightOnlyConfig())
    assert private_names.is_traceable_wrapper_subclass(model[0].weight)


def test_trees():
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = private_names.tree_flatten(tree)
    assert leaves == private_names.tree_leaves(tree) == [1, 2, None, 3]
    assert private_names.tree_unflatten(leaves, spec) == tree


def test_backward_has_a_number_and_an_end():
    assert private_names.running_backward() == private_names.NO_BACKWARD
    numbers, ended = [], []

    def hook(grad):
        numbers.append(private_names.running_backward())
        private_names.at_end_of_backward(lambda: ended.append(p.grad.item()))

    p = nn.Parameter(torch.ones(()))
    p.register_hook(hook)
    for _ in range(2):
        (3 * p).backward()
    assert len({*numbers, private_names.NO_BACKWARD}) == 3
    assert ended == [3, 6]  # when gradients are complete
    assert private_names.running_backward() == private_names.NO_BACKWARD


def test_a_recomputed_forward_runs_in_backward():
    numbers = []

    def square(x):
        numbers.append(private_names.running_backward())
        return x * x

    checkpoint(square, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert numbers[0] == private_names.NO_BACKWARD != numbers[1]


def test_check_accumulates():
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            try:
                private_names.check_accumulates(ctx.next_functions[0][0])
                seen.append("accumulates")
            except RuntimeError:
                seen.append("asked for")
            return grad

    p = nn.Parameter(torch.ones(()))
    Seen.apply(p).backward()
    torch.autograd.grad(Seen.apply(p), p)
    assert seen == ["accumulates", "asked for"]


def test_gradient_hooks():
    p = nn.Parameter(torch.ones(()))
    assert private_names.gradient_hooks(p) == []
    hooks = [lambda grad: None, lambda p: None]
    handles = [p.register_hook(hooks[0]), p.register_post_accumulate_grad_hook(hooks[1])]
    assert private_names.gradient_hooks(p) == hooks
    for handle in handles:
        handle.remove()
    assert private_names.gradient_hooks(p) == []


def test_is_saved_by_its_maker():
    x = torch.randn(4, 6, requires_grad=True)
    kept = [torch.relu(x), torch.relu_(x * 1), x.tanh(), x.sigmoid(), x.softmax(-1), x.relu().view(2, 12), x.relu()[1:]]
    assert all(private_names.is_saved_by_its_maker(y) for y in kept)
    others = [x, x.detach(), x * 2, torch.nn.functional.gelu(x), torch.nn.functional.linear(x, x), x.view(24)]
    assert not any(private_names.is_saved_by_its_maker(y) for y in others)


def test_set_steps_with_scaler():
    """``GradScaler`` then calls ``step()`` with an overflow, and tells it so."""
    found = []

    class Seen(torch.optim.SGD):
        def step(self, closure=None):
            found.append(bool(getattr(self, "found_inf", False)))

    p = nn.Parameter(torch.ones(()))
    optimizer, scaler = Seen([p], lr=0.1), torch.amp.GradScaler("cpu")
    for value in (False, True):
        if value:
            private_names.set_steps_with_scaler(optimizer, True)
        p.grad = scaler.scale(torch.tensor(float("inf")))
        scaler.step(optimizer)
        scaler.update()
    assert found == [True]
    private_names.set_steps_with_scaler(optimizer, False)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def test_run_first():
    p, order = nn.Parameter(torch.ones(())), []
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: order.append("earlier"))
    hook = optimizer.register_step_post_hook(lambda *_: order.append("later"))
    private_names.run_first(optimizer, hook)
    optimizer.step()
    assert order == ["later", "earlier"]


def test_devices_of_fused_kernels():
    assert {"cpu", "cuda"} <= {*private_names.devices_of_fused_kernels()}
    p = nn.Parameter(torch.ones(()))
    p.grad = torch.ones(())
    torch.optim.AdamW([p], lr=0.5, weight_decay=0.0, fused=True).step()
    assert p.item() == pytest.approx(0.5)


def test_keeps_identity():
    module = nn.Linear(2, 2)
    for device in ("cpu", "meta"):
        p = module.weight
        kept = private_names.keeps_identity(torch.empty(0), torch.empty(0, device=device))
        module.to(device)
        assert (module.weight is p) == kept
    assert not kept


def test_assert_async():
    private_names.assert_async(torch.tensor(True), "is true")
    with pytest.raises(RuntimeError, match="is false"):
        private_names.assert_async(torch.tensor(False), "is false")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_onednn_linear():
    assert private_names.has_onednn_linear()
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    torch.testing.assert_close(private_names.onednn_linear(x, weight), x @ weight.t(), rtol=0, atol=0)  # small integers


@in_own_process
def test_ddp():
    inside = []

    class Model(nn.Linear):
        def forward(self, x):
            inside.append(private_names.is_in_ddp_forward())
            return super().forward(x)

    ddp = DistributedDataParallel(Model(2, 2))
    assert not private_names.is_in_ddp_forward()
    ddp(torch.ones(1, 2)).sum().backward()
    assert inside == [True]
    assert not private_names.is_in_ddp_forward()
    assert {*private_names.parameters_of_ddp(ddp)} == {*ddp.parameters()}
    assert not private_names.is_joining(ddp)
    with Join([ddp]):
        assert private_names.is_joining(ddp)
        ddp(torch.ones(1, 2)).sum().backward()


@in_own_process
def test_process_groups_and_collectives():
    group = dist.group.WORLD
    assert torch.device("cpu") in private_names.device_types_of(group)
    collectives = private_names.functional_collectives()
    summed = collectives.all_reduce(torch.ones(2), "sum", group)
    assert isinstance(summed, collectives.AsyncCollectiveTensor)
    assert torch.equal(summed + 0, torch.ones(2))


@in_own_process
def test_sharded_modules():
    mesh = init_device_mesh("cpu", (1,))
    parallel = parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    assert private_names.is_parallelized(parallel)
    sharded = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh)), mesh=mesh)
    assert not private_names.is_parallelized(sharded)
    assert not private_names.prefetches(sharded)
    sharded.set_modules_to_forward_prefetch([sharded[0]])
    assert private_names.prefetches(sharded)
    assert not private_names.prefetches(nn.Linear(2, 2))


@in_own_process
def test_gathered_by_fsdp():
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    assert id(model.weight) not in private_names.gathered_by_fsdp()
    shard, values = model.weight, model.weight.full_tensor()
    model(torch.ones(1, 2))
    whole = private_names.gathered_by_fsdp()[id(shard)]
    model.unshard()
    assert torch.equal(whole, values)


@in_own_process
def test_around_waits_of_fsdp():
    """Every collective of a forward and backward is in one of the wrapped calls, and no computation is."""
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(1, 2))  # FSDP2 makes its groups complete
    calls, inside = [], []

    def around(call):
        def wrapped(*arguments, **keywords):
            inside.append(call)
            try:
                return call(*arguments, **keywords)
            finally:
                inside.pop()
                calls.append(call.__name__)

        return wrapped

    private_names.around_waits_of_fsdp(model, around)
    computing = []
    model[0].register_forward_hook(lambda *_: computing.append(len(inside)))
    model[1].register_full_backward_hook(lambda *_: computing.append(len(inside)))
    model(torch.ones(1, 2)).sum().backward()
    assert computing == [0, 0]
    assert {"pre_forward", "unshard", "wait_for_unshard", "pre_backward", "post_backward", "finalize_backward"} == {
        *calls
    }
    private_names.around_waits_of_fsdp(nn.Linear(2, 2), around)


def test_compiled_modules():
    plain, called, wrapped = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    called.compile()
    compiled = torch.compile(wrapped)
    assert [private_names.has_compiled_call(m) for m in (plain, called)] == [False, True]
    assert [private_names.is_compiled(m) for m in (plain, called, wrapped, compiled)] == [False, True, False, True]
    assert private_names.without_compile(compiled) is wrapped
    assert private_names.without_compile(plain) is plain


def test_experts_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=1, num_local_experts=2, vocab_size=16, experts_implementation="eager"
    )
    assert private_names.experts_implementation(config) == "eager"
    model = transformers.MixtralForCausalLM(config)
    (experts,) = [m for m in model.modules() if private_names.has_gate_of_experts(m)]
    assert experts.gate_up_proj.shape == (2, 16, 8)
    x = torch.randn(3, 16)
    gated = private_names.apply_gate(experts, x)
    torch.testing.assert_close(gated, nn.functional.silu(x[:, :8]) * x[:, 8:])
    private_names.set_experts_implementation(config, "grouped_mm")
    assert private_names.experts_implementation(model.config) == "grouped_mm"


def test_attention_of_transformers():
    transformers = pytest.importorskip("transformers")
    called = []

    def attention(module, query, key, value, mask, **_):
        called.append(mask)
        return query.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("of_a_test", attention)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=16)
    assert private_names.attends_by_interface(transformers.LlamaForCausalLM)
    private_names.set_attention(config, "of_a_test")
    model = transformers.LlamaForCausalLM(config)
    model(torch.zeros(1, 3, dtype=torch.long))
    assert len(called) == 1


def test_blocks_that_checkpoint_with_a_cache():
    """transformers reads the mark where it checkpoints layers."""
    layers = pytest.importorskip("transformers.modeling_layers")
    assert "_can_checkpoint_with_cache" in inspect.getsource(layers.GradientCheckpointingLayer)
    block = nn.Linear(2, 2)
    assert not private_names.checkpoints_with_cache(block)
    block._can_checkpoint_with_cache = True
    assert private_names.checkpoints_with_cache(block)
