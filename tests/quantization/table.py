"""What must happen to each method of these tests, in each layout. Knows no vLLM.

`TRIP`: saved, and loaded in another process exactly as the original. `REFUSE`: the save names the
module and refuses. `EITHER`: one of the two; the reason stands beside it. Nothing may load wrong.
"""

TRIP, REFUSE, EITHER = "trip", "refuse", "either"
LAYOUTS = ("auto", "runtime", "source")

Expected = tuple[str, str, str]

ALWAYS: Expected = (TRIP, TRIP, TRIP)
#: Only processing the source tensors again can make it.
SOURCE_ONLY: Expected = (TRIP, REFUSE, TRIP)
#: Source tensors alone don't give it; source layout holds it if more than they is saved.
RUNTIME_FIRST: Expected = (TRIP, TRIP, EITHER)
#: Source layout holds it; whether runtime layout does as well is the product's choice.
SOURCE_FIRST: Expected = (TRIP, EITHER, TRIP)
#: Refused today; the product may become able to hold it.
ANY: Expected = (EITHER, EITHER, EITHER)

TABLE: dict[str, Expected] = {
    # in_tensors
    "plain": ALWAYS,
    "transpose": ALWAYS,
    "transpose_in_place": ALWAYS,
    "strided": ALWAYS,
    "repack": ALWAYS,
    "rename": ALWAYS,
    "delete_and_replace": ALWAYS,
    "set_to_none": ALWAYS,
    "transient": ALWAYS,
    "attribute": ALWAYS,
    "alias": ALWAYS,
    "offset": ALWAYS,
    "arena": ALWAYS,
    "expanded": SOURCE_FIRST,
    "sparse": SOURCE_FIRST,  # safetensors has no sparse tensors
    "mkldnn": SOURCE_FIRST,
    "compressed": ALWAYS,  # sizes follow from the weights, yet attributes can be set anew
    "lies": ALWAYS,
    "on_parameter": ALWAYS,
    "on_buffer": ALWAYS,
    "number_on_parameter": ALWAYS,
    # in_python
    "object": ALWAYS,
    "slots": ALWAYS,
    "dataclass": ALWAYS,
    "frozen_dataclass": ALWAYS,
    "frozen_slotted_dataclass": ALWAYS,
    "named_tuple": SOURCE_ONLY,
    "dict": ALWAYS,
    "list": ALWAYS,
    "tuple": ALWAYS,
    "number_in_tuple": SOURCE_ONLY,
    "list_with_attribute": ALWAYS,
    "words": ALWAYS,
    "enum": SOURCE_ONLY,
    "function_choice": SOURCE_ONLY,
    "class_choice": SOURCE_ONLY,
    "only_if": SOURCE_FIRST,
    "only_if_not": SOURCE_FIRST,
    "attribute_only_if": ALWAYS,
    "closure": ALWAYS,
    "partial": ALWAYS,
    "number_in_partial": ALWAYS,  # keywords lie in a dict
    "bound_method": ALWAYS,
    "default_argument": SOURCE_ONLY,
    "module_in_list": ALWAYS,
    "child_module": ANY,  # the model gets a module that its constructor did not make
    "numpy": ALWAYS,
    "numpy_reversed": SOURCE_FIRST,
    "numpy_structured": SOURCE_FIRST,
    "numpy_read_only": SOURCE_FIRST,
    "numpy_scalar": SOURCE_FIRST,
    "bytes": SOURCE_ONLY,
    "normalized": ALWAYS,
    "packed_tuple_of_tensors": ALWAYS,
    "long_chain": SOURCE_FIRST,
    "quant_method_replaced": ALWAYS,
    # hidden
    "handle": SOURCE_ONLY,
    "handle_in_string": SOURCE_ONLY,
    "handle_in_set": SOURCE_ONLY,
    "handle_in_float": SOURCE_ONLY,
    "handle_in_attribute_tensor": SOURCE_ONLY,
    "handle_in_parameter": SOURCE_ONLY,
    "handle_in_float_buffer": SOURCE_ONLY,
    "handle_in_tuple": ANY,  # neither an address nor replaceable
    "reused_handle": ANY,  # all layers share one registry, which a rehearsal of one of them lacks
    "by_name": SOURCE_FIRST,
    "copy_by_name": SOURCE_FIRST,
    "by_id": SOURCE_ONLY,
    "copy_by_id": SOURCE_ONLY,
    "wide_copy_by_id": SOURCE_ONLY,
    "by_content": (EITHER, EITHER, TRIP),  # in the process that saves nothing is amiss
    "on_class": SOURCE_FIRST,
    "on_config": ANY,
    "capsule_on_config": ANY,
    "capsule": SOURCE_ONLY,
    "address": SOURCE_ONLY,
    "ctypes": SOURCE_ONLY,
    "array": SOURCE_ONLY,
    "script_object": SOURCE_ONLY,
    "others_weight": ANY,  # a rehearsal of one layer has no weights of another
    "reads_other": ANY,
    "scales_other": SOURCE_FIRST,
    "attribute_of_other": SOURCE_FIRST,
    # loaders
    "random": RUNTIME_FIRST,
    "hash_of_name": ALWAYS,
    "hash_of_name_in_tuple": ANY,
    "asserts": SOURCE_FIRST,  # placeholders need not satisfy every assertion
    "loader_takes_notes": SOURCE_FIRST,
    "loader_takes_notes_quietly": ALWAYS,
    "loader_keeps_sum": ALWAYS,
    "loader_writes_other": ALWAYS,
    "loader_adds": ALWAYS,
    "loader_is_partial": SOURCE_ONLY,
    "padded_with_zeros": SOURCE_ONLY,
    "padded_with_threes": ANY,  # the constructor alone knows the padding
    "number_from_buffer": ALWAYS,
    "clamps": ALWAYS,
    "number_if_negative": ALWAYS,
    "lazy": ALWAYS,
    # experts
    "experts_number": ALWAYS,
    "experts_by_id": SOURCE_ONLY,
    "experts_by_name": SOURCE_FIRST,
    # head
    "head_packed": ALWAYS,
    "head_by_id": SOURCE_ONLY,
    # attention
    "attention_number": ALWAYS,
    "attention_object": ALWAYS,
    "attention_ctypes": ANY,
    "attention_numpy_scalar": SOURCE_FIRST,
    "attention_decimal": SOURCE_FIRST,
    "attention_bytearray": SOURCE_FIRST,
    "attention_tensor_attribute": ALWAYS,
    "attention_list_subclass": ALWAYS,
    "attention_private_slot": ALWAYS,
    "attention_by_id": SOURCE_FIRST,
    "attention_same_repr": ALWAYS,
    "attention_same_path": ALWAYS,
    "attention_cache": ANY,
    "attention_weakref": ALWAYS,
    "attention_new_class": SOURCE_FIRST,
    "attention_new_module": SOURCE_FIRST,
    "attention_generator": ANY,
    "attention_memoryview": ANY,
    "attention_fraction": SOURCE_FIRST,
    "attention_globals": SOURCE_FIRST,
    "attention_code": SOURCE_FIRST,
    "attention_itemgetter": ANY,
    "attention_function": SOURCE_FIRST,
    "attention_class": SOURCE_FIRST,
    "attention_handle": ANY,
    "attention_handle_in_string": ANY,
}

#: What processing makes differs between two processes that load the same checkpoint, stock ones too:
#: such a method is compared with the process that saved, not with a reference.
OWN_REFERENCE = frozenset({"random", "hash_of_name", "hash_of_name_in_tuple"})
#: Stock's directory lacks a number that any rehearsal in one process gives, and another process does
#: not: nothing tells that it is missing.
UNKNOWABLE = frozenset({"hash_of_name", "hash_of_name_in_tuple"})
#: Its state appears when it first runs, and looking at the kernels runs it.
LATE = frozenset({"lazy"})
#: Attributes that lead to state outside of Python, or to a process's registry: no two processes need
#: agree on them, only on what lies behind.
VOLATILE = (".handle", ".pointer")
#: Methods drawn at random: only what lies where it can't be replaced may need its source.
SCATTERED = SOURCE_FIRST
#: Seeds of the methods drawn at random.
SEEDS = range(24)
#: Of these, the ones of the default run; the rest are the full matrix.
FEW_SEEDS = range(6)
#: Methods that the default run takes through every layout, and to stock vLLM and back.
CHOSEN = frozenset(
    {
        "transpose_in_place",
        "repack",
        "alias",
        "offset",
        "lies",
        "frozen_dataclass",
        "closure",
        "number_in_tuple",
        "words",
        "normalized",
        "handle_in_string",
        "by_name",
        "by_id",
        "hash_of_name",
        "asserts",
        "loader_takes_notes",
        "clamps",
        "attention_number",
        "attention_function",
    }
)
#: Methods and layouts for what takes a directory each.
DEEPER = (("attribute", "runtime"), ("frozen_dataclass", "auto"), ("transpose_in_place", "source"))
#: Methods that are loaded, saved from there, and loaded again.
AGAIN = (
    "transpose_in_place",
    "attribute",
    "alias",
    "closure",
    "frozen_dataclass",
    "number_in_tuple",
    "handle",
    "loader_is_partial",
    "strided",
    "normalized",
)
#: Methods that process-wide registries would confuse with their twins.
BY_NAME = ("by_name", "copy_by_name", "on_class", "experts_by_name")
