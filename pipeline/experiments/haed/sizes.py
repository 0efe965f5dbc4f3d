"""Changes to the presets that several tables and figures share."""

UNTABLED = ("model.encoder.rows=0", "model.decoder.grams.rows=0")
TABLES = ("model.encoder.rows=32768", "model.decoder.grams.rows=32768")
ALONE = ("model.mixture.known=0", "iem.correction=none", "finetune.iem_weight=0")  # the decoder is the likelihood
TODAY = (  # the presets' losses, at the paper's sizes
    *(
        "iem.correction=inclusion",
        "iem.duplicates=false",
        "iem.similarity=cosine",
        "iem.scale=learned",
        "iem.bias=true",
    ),
    *("iem.head=linear", "iem.extra_batches=0", "model.mixture.known=null", "pretrain.decode_fraction=0.15"),
    *("finetune.decode_fraction=0.5", "finetune.iem_weight=1"),
)
