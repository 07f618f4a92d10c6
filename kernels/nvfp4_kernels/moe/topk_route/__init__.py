"""Choice of a batch's experts and its tokens in token tiles by one launch, from logits on."""
