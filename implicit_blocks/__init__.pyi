# The public names, each written once; implicit_blocks/__init__.py imports them on first use. The star imports
# stand for the components that these packages register: `ib.Anderson` and `ib.AndersonSpec`, for example.

from implicit_blocks.checkpoints.load_model import load_model as load_model
from implicit_blocks.decoding import Generated as Generated
from implicit_blocks.decoding import Scored as Scored
from implicit_blocks.decoding import generate as generate
from implicit_blocks.decoding import score as score
from implicit_blocks.decoding import stream as stream
from implicit_blocks.depths import *  # noqa: F403 - all that it registers
from implicit_blocks.depths.depth import Depth as Depth
from implicit_blocks.exits import *  # noqa: F403 - all that it registers
from implicit_blocks.exits import Exit as Exit
from implicit_blocks.exits import Readout as Readout
from implicit_blocks.exits import exit_distribution as exit_distribution
from implicit_blocks.exits import first_exit as first_exit
from implicit_blocks.fixed_point import FixedPoint as FixedPoint
from implicit_blocks.gradients import *  # noqa: F403 - all that it registers
from implicit_blocks.gradients import jacobian_free as jacobian_free
from implicit_blocks.injections import *  # noqa: F403 - all that it registers
from implicit_blocks.injections import Injection as Injection
from implicit_blocks.interfaces import GradientEstimator as GradientEstimator
from implicit_blocks.interfaces import Map as Map
from implicit_blocks.interfaces import Mixer as Mixer
from implicit_blocks.interfaces import RowMap as RowMap
from implicit_blocks.interfaces import SearchingSolver as SearchingSolver
from implicit_blocks.interfaces import SearchLike as SearchLike
from implicit_blocks.interfaces import SequenceMap as SequenceMap
from implicit_blocks.interfaces import Solver as Solver
from implicit_blocks.interfaces import SteppingMap as SteppingMap
from implicit_blocks.mixers import *  # noqa: F403 - all that it registers
from implicit_blocks.mlps import FeedForwardSpec as FeedForwardSpec
from implicit_blocks.mlps import SwiGLUSpec as SwiGLUSpec
from implicit_blocks.models.explicit import ExplicitLM as ExplicitLM
from implicit_blocks.models.implicit import ImplicitLM as ImplicitLM
from implicit_blocks.models.implicit_spec import AtEvaluation as AtEvaluation
from implicit_blocks.models.implicit_spec import ImplicitLMSpec as ImplicitLMSpec
from implicit_blocks.models.implicit_spec import StoppingOverrides as StoppingOverrides
from implicit_blocks.models.objective_specs import ExitExpectationSpec as ExitExpectationSpec
from implicit_blocks.models.objective_specs import ExitMixtureSpec as ExitMixtureSpec
from implicit_blocks.models.objective_specs import IteratesObjectiveSpec as IteratesObjectiveSpec
from implicit_blocks.models.objective_specs import LastObjectiveSpec as LastObjectiveSpec
from implicit_blocks.models.objectives import Objective as Objective
from implicit_blocks.models.outputs import Iterate as Iterate
from implicit_blocks.models.outputs import LMOutput as LMOutput
from implicit_blocks.models.specs import ExplicitLMSpec as ExplicitLMSpec
from implicit_blocks.models.specs import LayerSpec as LayerSpec
from implicit_blocks.models.specs import StackSpec as StackSpec
from implicit_blocks.registry import build as build
from implicit_blocks.registry.hooks import hookimpl as hookimpl
from implicit_blocks.scalings import *  # noqa: F403 - all that it registers
from implicit_blocks.scalings.scaling import Scaling as Scaling
from implicit_blocks.search.convergence_watch import ConvergenceWarning as ConvergenceWarning
from implicit_blocks.search.iteration_budget import IterationBudget as IterationBudget
from implicit_blocks.search.loops import LoopCounts as LoopCounts
from implicit_blocks.search.search import Search as Search
from implicit_blocks.search.search import solve_fixed_point as solve_fixed_point
from implicit_blocks.serving.inspection import inspect as inspect
from implicit_blocks.solution import Adjoint as Adjoint
from implicit_blocks.solution import Solution as Solution
from implicit_blocks.solvers import *  # noqa: F403 - all that it registers
from implicit_blocks.specs.base import ComponentSpec as ComponentSpec
from implicit_blocks.specs.families import DepthSpec as DepthSpec
from implicit_blocks.specs.families import ExitSpec as ExitSpec
from implicit_blocks.specs.families import GradientSpec as GradientSpec
from implicit_blocks.specs.families import InjectionSpec as InjectionSpec
from implicit_blocks.specs.families import MixerSpec as MixerSpec
from implicit_blocks.specs.families import MLPSpec as MLPSpec
from implicit_blocks.specs.families import ModelSpec as ModelSpec
from implicit_blocks.specs.families import ObjectiveSpec as ObjectiveSpec
from implicit_blocks.specs.families import ScalingSpec as ScalingSpec
from implicit_blocks.specs.families import SolverSpec as SolverSpec
from implicit_blocks.specs.families import StartSpec as StartSpec
from implicit_blocks.specs.families import Stopping as Stopping
from implicit_blocks.specs.loading import load_spec as load_spec
from implicit_blocks.starts import *  # noqa: F403 - all that it registers
from implicit_blocks.starts.start import Start as Start
from implicit_blocks.windows import Window as Window

__version__: str
