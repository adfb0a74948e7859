"""Compilation of kernel parts: functions that only kernels call, compiled into them and never by themselves.

Left alone, Numba optimises each function together with all that it calls and makes machine code of it, and
does both once more in everything that calls it: a kernel of many levels is compiled many times over. A part's
own machine code would never run, so there is none. Loops are still optimised before a kernel takes them in:
products come out 4 % slower without that. What only calls others is not, nor what makes arrays.
"""

from __future__ import annotations

from typing import Any

from numba.core import compiler, typed_passes
from numba.core.analysis import compute_cfg_from_blocks
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_machinery import AnalysisPass, register_pass


class PartLibrary(JITCodeLibrary):
    """Library with LLVM's form of a part, to be linked into kernels. Nothing in it has an address."""

    is_optimised = False

    def _optimize_final_module(self) -> None:
        if self.is_optimised:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, since the code of a part has no address."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """Return a generator that notes no address of a function's environment, as Numba's does."""
        return _NoAddresses


class _NoAddresses:
    @staticmethod
    def set_env(name: str, environment: Any) -> None: ...


@register_pass(mutates_CFG=False, analysis_only=True)
class IntoPartLibrary(AnalysisPass):
    """Compiler pass that makes the passes after it put a function into a `PartLibrary`."""

    _name = "into_part_library"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        """Set the function's library; the function itself stays as before."""
        state.library = PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        loops = compute_cfg_from_blocks(state.func_ir.blocks).loops()
        state.library.is_optimised = bool(loops) and not state.flags.nrt
        state.library.enable_object_caching()
        return False


class PartCompiler(compiler.CompilerBase):
    """Compiler with Numba's passes, and `IntoPartLibrary` before a function is lowered."""

    def define_pipelines(self) -> list[Any]:
        """Return a single pipeline, because parts of kernels never run as Python."""
        passes = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(IntoPartLibrary, typed_passes.IRLegalization)
        passes.finalize()
        return [passes]
