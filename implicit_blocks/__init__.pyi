# The public names, each written once; implicit_blocks/__init__.py imports them on first use. The star imports
# stand for the components that these packages register: `ib.Anderson` and `ib.AndersonSpec`, for example.

from implicit_blocks.checkpoints.load_model import load_model as load_model
from implicit_blocks.decoding import Generated as Generated
from implicit_blocks.decoding import Scored as Scored
from implicit_blocks.decoding import generate as generate
from implicit_blocks.decoding import score as score
from implicit_blocks.decoding import stream as stream
from implicit_blocks.fixed_point import FixedPoint as FixedPoint
from implicit_blocks.fixed_point import solve_fixed_point as solve_fixed_point
from implicit_blocks.gradients import *  # noqa: F403 - all that it registers
from implicit_blocks.gradients import jacobian_free as jacobian_free
from implicit_blocks.interfaces import GradientEstimator as GradientEstimator
from implicit_blocks.interfaces import Map as Map
from implicit_blocks.interfaces import Mixer as Mixer
from implicit_blocks.interfaces import RowMap as RowMap
from implicit_blocks.interfaces import SearchLike as SearchLike
from implicit_blocks.interfaces import SequenceMap as SequenceMap
from implicit_blocks.interfaces import Solver as Solver
from implicit_blocks.interfaces import SteppingMap as SteppingMap
from implicit_blocks.interfaces import Window as Window
from implicit_blocks.mixers import *  # noqa: F403 - all that it registers
from implicit_blocks.models.explicit import ExplicitLM as ExplicitLM
from implicit_blocks.models.implicit import ImplicitLM as ImplicitLM
from implicit_blocks.models.outputs import LMOutput as LMOutput
from implicit_blocks.models.specs import AtEvaluation as AtEvaluation
from implicit_blocks.models.specs import ExplicitLMSpec as ExplicitLMSpec
from implicit_blocks.models.specs import ImplicitLMSpec as ImplicitLMSpec
from implicit_blocks.models.specs import StoppingOverrides as StoppingOverrides
from implicit_blocks.models.specs import SwiGLUSpec as SwiGLUSpec
from implicit_blocks.registry import build as build
from implicit_blocks.registry.hooks import hookimpl as hookimpl
from implicit_blocks.search.convergence_watch import ConvergenceWarning as ConvergenceWarning
from implicit_blocks.search.search import Search as Search
from implicit_blocks.solution import Adjoint as Adjoint
from implicit_blocks.solution import Solution as Solution
from implicit_blocks.solvers import *  # noqa: F403 - all that it registers
from implicit_blocks.specs.base import ComponentSpec as ComponentSpec
from implicit_blocks.specs.families import GradientSpec as GradientSpec
from implicit_blocks.specs.families import MixerSpec as MixerSpec
from implicit_blocks.specs.families import MLPSpec as MLPSpec
from implicit_blocks.specs.families import ModelSpec as ModelSpec
from implicit_blocks.specs.families import SolverSpec as SolverSpec
from implicit_blocks.specs.families import Stopping as Stopping
from implicit_blocks.specs.loading import load_spec as load_spec

__version__: str
