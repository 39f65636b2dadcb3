"""Programs made to crash or exhaust what reads them."""

FINE = "module { func.func @main(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> } }"


def nested_too_deeply(depth: int = 300_000) -> str:
    """Brackets that overflow the stack of MLIR's parser: SIGSEGV."""
    return FINE.replace("module", f"module attributes {{x = {'[' * depth}{']' * depth}}}", 1)


def huge_constant(elements: int = 20_000_000) -> str:
    """A constant that takes 40 MB as text, and more than 1 GB in the parser."""
    values = "1," * (elements - 1) + "1"
    constant = f"%0 = stablehlo.constant dense<[{values}]> : tensor<{elements}xi8>"
    return FINE.replace("return", f"{constant}\n return")


def endless(levels: int = 40) -> str:
    """A function of two calls of a function of two calls...: 2^40 operations once inlined.

    It stays in C++ for as long as there is memory.
    """
    functions = [
        "func.func private @f0(%a: tensor<f32>) -> tensor<f32> "
        "{ %0 = stablehlo.add %a, %a : tensor<f32>\n return %0 : tensor<f32> }"
    ]
    for level in range(1, levels + 1):
        name = "@main" if level == levels else f"private @f{level}"
        call = f"call @f{level - 1}"
        functions.append(
            f"func.func {name}(%a: tensor<f32>) -> tensor<f32> {{"
            f" %0 = {call}(%a) : (tensor<f32>) -> tensor<f32>\n"
            f" %1 = {call}(%0) : (tensor<f32>) -> tensor<f32>\n return %1 : tensor<f32> }}"
        )
    return "module {" + "\n".join(functions) + "}"
