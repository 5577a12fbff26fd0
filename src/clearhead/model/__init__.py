"""The network. This room imports no other room of the house.

The walk from ids to logits, one file each:

    transformer   encode, decode, forward: the table of contents
    embedding     ids -> vectors, and at the end vectors -> logits
    context       what each kind of layer is told: its mask (masks) and its positions (positions)
    block         norms, residuals, the order of the branches
    attention     queries, keys, values (latent_attention: DeepSeek's)
    attend        softmax(QKᵀ)V, the reference and the fused kernel
    feed_forward  the other branch (mixture: many of them)

One alphabet of shapes for the whole repository:

    B batch    T query tokens    S key tokens    D width    V vocabulary    L layers
    N heads    K key-value heads    H head width    F feed-forward width    E experts    R latent rank
"""
