"""What more than one table or figure changes of the presets."""

UNTABLED = ("model.encoder.rows=0", "model.decoder.grams.rows=0")
ALONE = ("model.mixture.known=0", "iem.correction=none", "finetune.iem_weight=0")  # the decoder is the likelihood
