"""Descriptions of specs: a model as a tree with shapes and parameter counts, and spec differences."""

from implicit_blocks.describing.changes import Change, changes, draw_changes
from implicit_blocks.describing.drawing import draw_run
from implicit_blocks.describing.tree import Node, model_tree

__all__ = ["Change", "Node", "changes", "draw_changes", "draw_run", "model_tree"]
