"""The entry point of vLLM's plugin group `vllm.general_plugins`.

vLLM loads it in every process it starts, and more than once in some
(`vllm.plugins.load_general_plugins`). An error while a plugin *module* is imported is only logged
there, an error raised by its function stops the start: so this module imports nothing heavy, and
whatever can fail happens in `register`.
"""

from vllm_sharded_state import __version__, envs

#: Minor versions of vLLM whose loader, reload and KV-cache code the patches were written against.
SUPPORTED_VLLM = ((0, 32), (0, 33))

_registered = False


def _is_supported(version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release[:2] in SUPPORTED_VLLM
    except InvalidVersion:  # a source tree without tags calls itself "dev"
        return False


def register() -> None:
    """Patch the running vLLM so that `sharded_state` checkpoints come back whole.

    Safe to call again: later calls in the same process do nothing. On a vLLM version that is not
    supported it logs one warning and changes nothing, unless `VSS_ALLOW_UNSUPPORTED_VLLM=1`.

    Raises:
        OptionError: an environment variable of this package has a value that means nothing.
        PatchError: a change to vLLM could not be made, or did not take. None is left half made.
    """
    global _registered
    if _registered:
        return

    import vllm
    from vllm.logger import init_logger

    logger = init_logger("vllm.sharded_state.plugin")
    if not _is_supported(vllm.__version__) and not envs.allow_unsupported_vllm():
        supported = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VLLM)
        logger.warning(
            "vllm-sharded-state %s does nothing: it supports vLLM %s, and this is %s. "
            "Set VSS_ALLOW_UNSUPPORTED_VLLM=1 to try it all the same.",
            __version__,
            supported,
            vllm.__version__,
        )
        _registered = True
        return

    from vllm_sharded_state.patches import Status, apply_all

    statuses = apply_all()
    _registered = True
    for status in Status:
        names = sorted(name for name, reached in statuses.items() if reached is status)
        if names and status is not Status.APPLIED:
            logger.info("Patches %s: %s", status.value, ", ".join(names))
    logger.debug("vllm-sharded-state %s: %s", __version__, statuses)
