"""No output of a model is a constant or an input: `check_outputs`, which all models of the tests pass."""

from onnx_export.nodes import DOMAIN, bodies, names_read

CONSTANT, INPUT = "a constant", "an input"


def check_model(model):
    """Check the outputs of a model, and of the bodies in it."""
    graph = model.graph
    known = {value.name: INPUT for value in graph.input} | {array.name: CONSTANT for array in graph.initializer}
    functions = {function.name: function for function in model.functions}
    check_outputs(graph.name, graph.node, known, [value.name for value in graph.output], functions)


def check_functions(model):
    """Check the outputs of the functions of a model that is somebody else's."""
    for function in model.functions:
        check_outputs(function.name, function.node, dict.fromkeys(function.input, INPUT), function.output, {})


def check_outputs(caller, nodes, known, outputs, functions):
    """Raise an AssertionError if an output, also of a body, is CONSTANT or INPUT: what no node computes in a run.

    onnxruntime may copy it while a GPU still computes. `known` has the values that are so, and gets those of the nodes;
    it is returned. A value that depends on constants alone is one, as onnxruntime computes it when it loads the model,
    and so is a shape, as a session may fix sizes.
    """
    for node in nodes:
        if node.domain == DOMAIN:
            callee = functions[node.op_type]
            given = {name: known[value] for name, value in zip(callee.input, node.input, strict=True) if value in known}
            within = check_outputs(caller, callee.node, given, (), functions)
            pairs = zip(callee.output, node.output, strict=True)
            known |= {value: within[name] for name, value in pairs if name in within}
        elif node.op_type in ("Shape", "Size") or all(known.get(name) == CONSTANT for name in names_read([node])):
            known |= dict.fromkeys(node.output, CONSTANT)
        elif node.op_type == "Identity" and node.input[0] in known:
            known[node.output[0]] = known[node.input[0]]
        for body in bodies(node):
            results = body.output[1:] if node.op_type == "Loop" else body.output  # without whether to go on
            inside = known | {value.name: INPUT for value in body.input}
            check_outputs(caller, body.node, inside, [value.name for value in results], functions)
    for name in outputs:
        assert name not in known, f"{caller}: the output {name} is {known[name]}, which no node computes"
    return known
