"""Megatron-LM checkpoints of every layout, opened as one state dict under canonical names.

    decoder.layers.L.self_attention.linear_qkv.weight             L: the layer's number in the whole model
    decoder.layers.L.mlp.experts.local_experts.E.linear_fc1.weight   E: the expert's number in the whole model
    mtp.layers.K.transformer_layer.<as in a decoder layer>
    embedding.word_embeddings.weight, decoder.final_layernorm.weight, output_layer.weight
    vision_model.<...>

Names are mcore's module names without what wraps the model (`model.`, `module.`, `language_model.`),
without stacking and sharding. A gated ``linear_fc1`` is [gate; up] whole, whatever wrote it. Which
Hugging Face tensor comes of which is not known here, but in lazymerge.conversions.megatron.
"""
