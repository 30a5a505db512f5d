"""The messages of protobuf that TensorFlow's graphs consist of: their fields by the names in TensorFlow's .proto files.

`graphs`, `objects` and `tensors` read fields by these numbers, and `text` writes them by these names. What stands here
is all that they ask for; other fields are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

TEXT, INTEGER, FLOAT, DOUBLE = "a text", "an integer", "a number", "a double"


class MessageFields:
    """The fields of a message: an attribute for the number of each."""

    def __init__(self, **fields: tuple[int, str | MessageFields]) -> None:
        self.fields = fields
        """The number of each field, and its type or message."""
        for name, (number, _) in fields.items():
            setattr(self, name, number)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


# -------------------------------------------------------------------------------------------- attributes of nodes
DIMENSION = MessageFields(size=(1, INTEGER))
SHAPE = MessageFields(dim=(2, DIMENSION), unknown_rank=(3, INTEGER))
TENSOR = MessageFields(
    dtype=(1, INTEGER), tensor_shape=(2, SHAPE), tensor_content=(4, TEXT), float_val=(5, FLOAT), double_val=(6, DOUBLE),
    int_val=(7, INTEGER), string_val=(8, TEXT), int64_val=(10, INTEGER), bool_val=(11, INTEGER), half_val=(13, INTEGER),
    uint32_val=(16, INTEGER), uint64_val=(17, INTEGER),
)  # fmt: skip
CALLED = MessageFields(name=(1, TEXT))
LIST = MessageFields(
    s=(2, TEXT), i=(3, INTEGER), f=(4, FLOAT), b=(5, INTEGER), type=(6, INTEGER), shape=(7, SHAPE), tensor=(8, TENSOR),
    func=(9, CALLED),
)  # fmt: skip
VALUE = MessageFields(**LIST.fields | {"list": (1, LIST), "func": (10, CALLED)})
ATTRIBUTE = MessageFields(key=(1, TEXT), value=(2, VALUE))

# ------------------------------------------------------------------------------------------------------------ graphs
NODE = MessageFields(name=(1, TEXT), op=(2, TEXT), input=(3, TEXT), attr=(5, ATTRIBUTE))
ARGUMENT = MessageFields(name=(1, TEXT))
SIGNATURE = MessageFields(name=(1, TEXT), input_arg=(2, ARGUMENT), output_arg=(3, ARGUMENT))
RETURNED = MessageFields(key=(1, TEXT), value=(2, TEXT))
FUNCTION = MessageFields(signature=(1, SIGNATURE), node_def=(3, NODE), ret=(4, RETURNED))
LIBRARY = MessageFields(function=(1, FUNCTION))
GRAPH = MessageFields(node=(1, NODE), library=(2, LIBRARY))

# ------------------------------------------------------------------------------------------- objects of TensorFlow 2
CHILD = MessageFields(node_id=(1, INTEGER), local_name=(2, TEXT))
CONSTANT = MessageFields(operation=(1, TEXT))
OBJECT = MessageFields(children=(1, CHILD), constant=(9, CONSTANT))
CAPTURED = MessageFields(bound_inputs=(2, INTEGER))
CAPTURES = MessageFields(key=(1, TEXT), value=(2, CAPTURED))
OBJECTS = MessageFields(nodes=(1, OBJECT), concrete_functions=(2, CAPTURES))

# ------------------------------------------------------------------------------------------------------------- files
META_INFO = MessageFields(tags=(4, TEXT))
SAVER = MessageFields(restore_op_name=(3, TEXT))
META_GRAPH = MessageFields(
    meta_info_def=(1, META_INFO), graph_def=(2, GRAPH), saver_def=(3, SAVER), object_graph_def=(7, OBJECTS)
)
SAVED_MODEL = MessageFields(meta_graphs=(2, META_GRAPH))
