"""`register`: the version gate, calling it twice, what importing it costs; and the variables."""

import logging
import subprocess
import sys

import pytest
import vllm

from vllm_sharded_state import envs, patches, plugin
from vllm_sharded_state.errors import OptionError, PatchError
from vllm_sharded_state.patches import PATCHES
from vllm_sharded_state.patches.contract import Status


@pytest.fixture(autouse=True)
def not_registered(monkeypatch):
    monkeypatch.setattr(plugin, "_registered", False)


@pytest.fixture
def warnings(monkeypatch):
    """The lines that the plugin's logger warns with."""
    lines: list[str] = []
    logger = logging.getLogger("vllm.sharded_state.plugin")
    monkeypatch.setattr(logger, "warning", lambda message, *args: lines.append(message % args))
    return lines


def faults() -> list[str]:
    return [patch.name for patch in PATCHES if patch.probe()]


ALL = [patch.name for patch in PATCHES]


def test_register_makes_every_change_and_again_is_harmless(warnings):
    assert faults() == ALL
    plugin.register()
    assert faults() == []
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    before = dict(vars(ShardedStateLoader))
    plugin.register()
    assert dict(vars(ShardedStateLoader)) == before
    assert warnings == []


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.2.post1", "0.33.0rc1"])
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    plugin.register()
    assert faults() == []


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0.dev7+gabc", "1.32.0", "dev"])
def test_another_version_gets_one_warning_and_no_change(monkeypatch, warnings, version):
    monkeypatch.setattr(vllm, "__version__", version)
    plugin.register()
    plugin.register()
    assert faults() == ALL
    (line,) = warnings
    assert version in line
    assert "0.32 and 0.33" in line
    assert "VSS_ALLOW_UNSUPPORTED_VLLM=1" in line


def test_another_version_is_patched_on_request(monkeypatch, warnings):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setenv("VSS_ALLOW_UNSUPPORTED_VLLM", "1")
    plugin.register()
    assert faults() == []
    assert warnings == []


def test_one_patch_off_by_name(monkeypatch):
    monkeypatch.setenv("VSS_DISABLE_PATCHES", "layerwise_any_loader,untie_word_embeddings")
    plugin.register()
    assert faults() == ["layerwise_any_loader", "untie_word_embeddings"]


def test_errors_stop_the_start_and_leave_vllm_as_it_was(monkeypatch):
    broken = patches.Patch(
        name="broken",
        module="vllm.config.model",
        symbol="NoSuchThing",
        probe=lambda: True,
        make=lambda original: original,
    )
    monkeypatch.setattr(patches.apply_all, "__defaults__", ((*PATCHES, broken),))
    with pytest.raises(PatchError, match=r"vllm\.config\.model\.NoSuchThing is missing"):
        plugin.register()
    assert faults() == ALL
    assert plugin._registered is False


def test_importing_the_plugin_is_cheap():
    code = (
        "import sys, vllm_sharded_state.plugin as plugin\n"
        "print([name for name in ('torch', 'vllm', 'packaging') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_entry_point_is_the_plugin():
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="vllm.general_plugins", name="sharded_state")
    assert entry.load() is plugin.register


def test_statuses_are_what_the_log_says():
    assert {status.value for status in Status} == {
        "applied",
        "switched off",
        "not needed, vLLM behaves already",
    }


@pytest.mark.parametrize("value", ["auto", "runtime", "source"])
def test_layout(monkeypatch, value):
    monkeypatch.setenv("VSS_LAYOUT", value)
    assert envs.layout() == value


def test_defaults_and_empty_values(monkeypatch):
    assert (envs.layout(), envs.allow_unsupported_vllm()) == ("auto", False)
    assert envs.disabled_patches(["a"]) == frozenset()
    for variable in ("VSS_LAYOUT", "VSS_ALLOW_UNSUPPORTED_VLLM", "VSS_DISABLE_PATCHES"):
        monkeypatch.setenv(variable, "")
    assert (envs.layout(), envs.allow_unsupported_vllm()) == ("auto", False)
    assert envs.disabled_patches(["a"]) == frozenset()


@pytest.mark.parametrize(
    ("variable", "read", "allowed"),
    [
        ("VSS_LAYOUT", envs.layout, "auto, runtime, source"),
        ("VSS_ALLOW_UNSUPPORTED_VLLM", envs.allow_unsupported_vllm, "0, 1"),
        ("VSS_DISABLE_PATCHES", lambda: envs.disabled_patches(["b", "a"]), "'all', .*a, b"),
    ],
)
def test_a_value_that_means_nothing(monkeypatch, variable, read, allowed):
    monkeypatch.setenv(variable, "nonsense")
    with pytest.raises(OptionError, match=f"{variable}='nonsense'.*{allowed}"):
        read()
