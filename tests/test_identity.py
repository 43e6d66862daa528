"""What binds a checkpoint: each field by itself is refused by name, and what is harmless is not."""

import enum
import json
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm import envs

from tests.support import manifests
from vllm_sharded_state import identity, switches
from vllm_sharded_state.checkpoint import manifest, staging
from vllm_sharded_state.checkpoint.manifest import Manifest, RankEntry
from vllm_sharded_state.errors import MismatchError, SaveError
from vllm_sharded_state.state.choices import changed, choices, different, together
from vllm_sharded_state.state.units import Unit

HF = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "factors": [1.0, float("nan")]},
    "layer_types": [],
    "quantization_config": {
        "quant_method": "fp8",
        "dtype": "float8_e4m3fn",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": {"num_bits": 8}, "targets": ["Linear"]}},
    },
}


def config(hf=None, files=("quantize_config.json",), **changes):
    """An engine's configuration with all that a binding looks at, and nothing else."""
    hf = HF if hf is None else hf
    model = {
        "hf_config": SimpleNamespace(**hf, to_dict=lambda: dict(hf)),
        "quantization": "fp8",
        "quantization_config": None,
        "dtype": torch.bfloat16,
        "model": "nowhere",
    }
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "expert_placement_strategy": "linear",
        "enable_eplb": False,
        "num_redundant_experts": 0,
    }
    cache = {"cache_dtype": "auto"}
    for group in (model, parallel, cache):
        group |= {name: value for name, value in changes.items() if name in group}
    redundant = SimpleNamespace(num_redundant_experts=parallel.pop("num_redundant_experts"))
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel, eplb_config=redundant),
        cache_config=SimpleNamespace(**cache),
        quant_config=SimpleNamespace(
            kv_cache_scheme=changes.get("kv_cache_scheme"), get_config_filenames=lambda: list(files)
        ),
    )


def saved_and_read(directory, binding):
    """The binding as a load finds it: through the file."""
    manifests.write(
        directory,
        Manifest(
            written_by={},
            save_id=staging.new_id(),
            binding=binding,
            tied_word_embeddings=False,
            ranks=[RankEntry(number) for number in range(_ranks(binding))],
        ),
    )
    return manifest.read(directory).binding


def _ranks(binding):
    world = binding["world"]
    return world["tensor_parallel_size"] * world["pipeline_parallel_size"]


def test_a_binding_comes_back_and_binds_nothing_else(tmp_path):
    binding = identity.binding(config())
    assert saved_and_read(tmp_path, binding) == binding
    identity.refuse_mismatch(
        saved_and_read(tmp_path, binding), identity.binding(config()), True, "x"
    )


#: What has each field of each group, whatever this machine is.
EXAMPLE = identity.binding(config())
FIELDS = [(group, name) for group, fields in EXAMPLE.items() for name in fields]


def _another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return [*value, "other"] if isinstance(value, list) else f"other than {value}"


@pytest.mark.parametrize("runtime", [True, False])
@pytest.mark.parametrize(("group", "name"), FIELDS)
def test_each_field_is_refused_by_name_and_alone(group, name, runtime):
    other = {g: dict(fields) for g, fields in EXAMPLE.items()}
    other[group][name] = _another(other[group][name])
    if group == "runtime" and not runtime:
        identity.refuse_mismatch(
            other, EXAMPLE, runtime, "here"
        )  # source layout is not bound by it
        return
    with pytest.raises(MismatchError) as caught:
        identity.refuse_mismatch(other, EXAMPLE, runtime, "here")
    first, *lines = str(caught.value).splitlines()
    assert first == "here was saved for another engine:"
    expected = f"  {group}.{name}: saved {other[group][name]!r}, here {EXAMPLE[group][name]!r}"
    assert [line for line in lines if line.startswith("  ")] == [expected]
    assert ("layout=source" in str(caught.value)) == (group == "runtime")


@pytest.mark.parametrize(("group", "name"), FIELDS)
def test_a_field_that_only_one_of_them_has_is_refused(group, name):
    less = {g: dict(fields) for g, fields in EXAMPLE.items()}
    value = less[group].pop(name)
    with pytest.raises(MismatchError, match="saved nothing, here") as caught:
        identity.refuse_mismatch(less, EXAMPLE, True, "here")
    assert f"{group}.{name}" in str(caught.value)
    with pytest.raises(MismatchError) as caught:
        identity.refuse_mismatch(EXAMPLE, less, True, "here")
    assert f"{group}.{name}: saved {value!r}, here nothing" in str(caught.value)


def _with(path, value):
    """HF, with another value at a dotted path."""

    def put(fields, names):
        head, *rest = names
        return fields | {head: put(fields[head], rest) if rest else value}

    return put(HF, path.split("."))


@pytest.mark.parametrize(
    ("group", "field", "other"),
    [
        ("world", "tensor_parallel_size", {"tensor_parallel_size": 2}),
        ("world", "pipeline_parallel_size", {"pipeline_parallel_size": 2}),
        ("world", "enable_expert_parallel", {"enable_expert_parallel": True}),
        ("world", "expert_placement_strategy", {"expert_placement_strategy": "round_robin"}),
        ("world", "enable_eplb", {"enable_eplb": True}),
        ("world", "num_redundant_experts", {"num_redundant_experts": 8}),
        ("model", "architectures", {"hf": _with("architectures", ["Other"])}),
        ("model", "config.hidden_size", {"hf": _with("hidden_size", 128)}),
        ("model", "config.rms_norm_eps", {"hf": _with("rms_norm_eps", 1e-6)}),
        (
            "model",
            "config.rope_parameters.rope_theta",
            {"hf": _with("rope_parameters.rope_theta", 1.0)},
        ),
        (
            "model",
            "config.rope_parameters.factors",
            {"hf": _with("rope_parameters.factors", [1.0, None])},
        ),
        ("model", "config.layer_types", {"hf": _with("layer_types", ["full"])}),
        (
            "model",
            "config.quantization_config.dtype",
            {"hf": _with("quantization_config.dtype", "x")},
        ),
        (
            "model",
            "config.quantization_config.ignore",
            {"hf": _with("quantization_config.ignore", [])},
        ),
        (
            "model",
            "config.quantization_config.config_groups.group_0.weights.num_bits",
            {"hf": _with("quantization_config.config_groups.group_0.weights.num_bits", 4)},
        ),
        ("model", "quantization", {"quantization": "awq"}),
        ("model", "quantization_config.linear", {"quantization_config": {"linear": "fp8"}}),
        ("model", "dtype", {"dtype": torch.float16}),
        ("runtime", "kv_cache_dtype", {"cache_dtype": "fp8_e5m2"}),
        ("runtime", "kv_cache_dtype", {"kv_cache_scheme": {"num_bits": 8}}),
    ],
)
def test_each_setting_of_an_engine_reaches_its_field(group, field, other):
    there, here = identity.binding(config(**other)), identity.binding(config())
    with pytest.raises(MismatchError) as caught:
        identity.refuse_mismatch(there, here, True, "x")
    named = [
        line.split(":")[0].strip() for line in str(caught.value).splitlines() if line[0] == " "
    ]
    assert f"{group}.{field}" in named
    # `architectures` is told twice: as the engine's and as the configuration's.
    assert {name.removeprefix("model.config.").removeprefix("model.") for name in named} == {
        f"{group}.{field}".removeprefix("model.config.").removeprefix("model.")
    }


@pytest.mark.parametrize(
    "name",
    ["_name_or_path", "transformers_version", "torch_dtype", "tie_word_embeddings", "use_cache"],
)
def test_what_says_nothing_about_weights_does_not_bind(name):
    identity.refuse_mismatch(
        identity.binding(config(hf=HF | {name: "other"})), identity.binding(config()), True, "x"
    )


def test_a_quantization_that_lies_in_a_file_of_its_own_binds(tmp_path):
    plain = {name: value for name, value in HF.items() if name != "quantization_config"}
    bindings = []
    for folder, bits in (("a", 4), ("b", 8)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "quantize_config.json").write_text(
            json.dumps({"bits": bits, "dtype": "x"})
        )
        bindings.append(identity.binding(config(hf=plain, model=str(tmp_path / folder))))
    with pytest.raises(MismatchError) as caught:
        identity.refuse_mismatch(*bindings, False, "x")
    assert "  model.quantization.quantize_config.json.bits: saved 4, here 8" in str(caught.value)
    assert "quantize_config.json.dtype" not in str(caught.value)
    assert bindings[0]["model"]["quantization.quantize_config.json.dtype"] == "x"


def test_a_long_value_is_cut():
    with pytest.raises(MismatchError) as caught:
        identity.refuse_mismatch(
            {"model": {"a": "x" * 10_000}}, {"world": {}, "model": {}}, False, "d"
        )
    assert len(str(caught.value)) < 1000


#: Switches of several platforms that lay weights out otherwise, and a value that is not the default.
SELECTING = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_ROCM_MOE_PADDING": "0",
    "VLLM_ROCM_FP8_PADDING": "0",
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_DISABLED_KERNELS": "MarlinLinearKernel",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_ZENTORCH_WEIGHT_PREPACK": "0",
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_PP_LAYER_PARTITION": "1,1",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "0",
}


@pytest.fixture
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("name", SELECTING)
def test_a_switch_that_selects_kernels_binds_runtime_layout(clean, name):
    before = identity.binding(config())
    assert switches.environment() == {}
    clean.setenv(name, SELECTING[name])
    assert switches.environment() == {name: envs.environment_variables[name]()}
    there = identity.binding(config())
    with pytest.raises(MismatchError) as caught:
        identity.refuse_mismatch(there, before, True, "x")
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"  runtime.environment.{name}: saved ")
    assert lines[0].endswith("here nothing")
    identity.refuse_mismatch(there, before, False, "x")  # source layout moves


@pytest.mark.parametrize("name", ["VLLM_USE_DEEP_GEMM", "VLLM_CPU_INT4_W4A8"])
def test_a_switch_that_is_set_to_its_default_does_not_bind(clean, name):
    clean.setenv(name, "1")
    assert os.environ[name] == "1"
    assert switches.environment() == {}
    assert os.environ[name] == "1"
    assert os.getenv(name) == "1"
    assert type(os.environ).__name__ == "_Environ"


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_LOGGING_LEVEL",
        "VLLM_PLUGINS",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_DP_RANK",
        "VLLM_HOST_IP",
        "VLLM_PORT",
        "VLLM_API_KEY",
        "VLLM_CACHE_ROOT",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "VLLM_USE_AOT_COMPILE",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_SSM_CONV_STATE_LAYOUT",
    ],
)
def test_a_variable_about_something_else_does_not_bind(clean, name):
    assert name in envs.environment_variables
    clean.setenv(name, "7")
    assert switches.environment() == {}


@pytest.mark.parametrize("way", ["onednn", "amx"])
def test_what_the_cpu_is_asked_for_binds_runtime_layout(monkeypatch, way):
    from vllm import _custom_ops

    there = identity.binding(config())
    if way == "onednn":
        monkeypatch.setattr(_custom_ops, "_supports_onednn", not _custom_ops._supports_onednn)
    else:
        amx = torch.cpu._is_amx_tile_supported()
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not amx)
    here = identity.binding(config())
    with pytest.raises(MismatchError, match=f"runtime.cpu_{way}: saved "):
        identity.refuse_mismatch(there, here, True, "x")
    identity.refuse_mismatch(there, here, False, "x")


def test_experts_over_data_parallel_ranks_are_not_saved_under_one_name():
    spread = config(data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(SaveError, match="data parallel ranks with expert parallelism"):
        identity.refuse_ambiguous_ranks(spread)
    identity.refuse_ambiguous_ranks(config())


class Backend(enum.Enum):
    MARLIN = "marlin"
    CUTLASS = "cutlass"


class Kernel:
    def __init__(self, split=False):
        self.split = split
        self.weight = torch.zeros(2)
        self.config = SimpleNamespace(bits=4)
        self.group = 128


Kernel.__module__ = "vllm.model_executor.kernels.linear.example"


class Method:
    def __init__(self):
        self.backend = Backend.MARLIN
        self.experts_cls = Kernel
        self.kernel = Kernel()
        self.use_marlin = True
        self.input_dtype = "int8"
        self.prefix = "model.layers.0.x"
        self.layer = None
        self.run = lambda: None
        self._cache = True


def _unit(method, name="a.b"):
    module = nn.Module()
    module.quant_method = method
    return Unit(name, {name: module}, True)


def test_choices_are_classes_enumerations_booleans_and_words_for_choices():
    assert choices(_unit(Method())) == {
        "quant_method": f"{__name__}.Method",
        "quant_method.backend": "Backend.MARLIN",
        "quant_method.experts_cls": "vllm.model_executor.kernels.linear.example.Kernel",
        "quant_method.kernel": "vllm.model_executor.kernels.linear.example.Kernel",
        "quant_method.kernel.split": False,
        "quant_method.use_marlin": True,
        "quant_method.input_dtype": "int8",
    }


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda m: setattr(m, "backend", Backend.CUTLASS),
            "backend: saved 'Backend.MARLIN', here 'Backend.CUTLASS'",
        ),
        (lambda m: setattr(m, "use_marlin", False), "use_marlin: saved True, here False"),
        (lambda m: setattr(m, "input_dtype", "fp8"), "input_dtype: saved 'int8', here 'fp8'"),
        (lambda m: setattr(m, "kernel", Kernel(True)), "kernel.split: saved False, here True"),
        (
            lambda m: delattr(m, "experts_cls"),
            f"experts_cls: saved '{Kernel.__module__}.Kernel', here nothing",
        ),
    ],
)
def test_another_choice_is_named_with_both_values(change, line):
    other = Method()
    change(other)
    assert different(choices(_unit(Method())), choices(_unit(other))) == [f"quant_method.{line}"]
    assert different(choices(_unit(Method())), choices(_unit(Method()))) == []


def test_a_part_that_refers_back_to_its_method_ends():
    method = Method()
    method.kernel.method = method
    assert "quant_method.kernel.method" not in choices(_unit(method))


def test_modules_below_a_unit_have_their_own_choices():
    unit = _unit(Method())
    below = nn.Module()
    below.scheme = Kernel()
    unit.modules["a.b.c"] = below
    assert choices(unit)["c.scheme.split"] is False


def test_what_processing_changed_is_put_together_again():
    before = {"a": True, "b": "x", "c": False}
    after = {"a": False, "b": "x", "d": "new"}
    change = changed(before, after)
    assert change == {"a": False, "c": None, "d": "new"}
    assert together(before, change) == after
    assert changed(before, before) == {}
