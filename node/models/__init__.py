"""Where a checkpoint's tensors are in a model's parameters, for engines and trainers. Needs torch.

`conversion` runs transformers' own loader on tensors that record where their elements came from (`symbols`), and
describes the result as affine boxes (`pieces`).

Modules:

- `conversion`: Where each tensor of a checkpoint is in a transformers model
- `dtypes`: The dtypes of checkpoints as torch's
- `pieces`: Where the elements of a checkpoint's tensor are in a model's parameter
- `symbols`: Tensors without elements that record where each of their elements came from
"""
