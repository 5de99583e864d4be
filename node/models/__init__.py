"""How a checkpoint's tensors stand in a model's parameters, for engines and trainers. Needs torch.

`conversion` runs the library's own loader on tensors that know where their elements came from (`symbols`), and
writes down what it did as affine boxes (`pieces`).

Modules:

- `conversion`: Where each tensor of a checkpoint stands in a transformers model
- `dtypes`: The dtypes of checkpoints as torch's
- `pieces`: Where the elements of a checkpoint's tensor stand in a model's parameter
- `symbols`: Tensors without elements that know where each of their elements came from
"""
