"""Stage 2: documents -> a SentencePiece vocabulary with multi-word pieces, behind a quality gate."""

import shutil
from itertools import chain

import numpy as np
from prefect.artifacts import create_markdown_artifact

from model.data.document_shards import iter_documents
from model.data.pieces import remove_partial
from model.data.tokenization.report import check_tokenizer
from model.data.tokenization.tokenizer import Tokenizer
from model.data.tokenization.training import MODEL_FILE, USE_FILE
from model.data.tokenization.training import train_tokenizer as train
from tasks.config import PipelineConfig
from tasks.engine import open_engine
from tasks.given_tokenizer import given_tokenizer
from tasks.manifest import Manifest
from tasks.stage import artifact_key, stage_task
from tasks.stages import tokenizer_stage


@stage_task("tokenizer")
def train_tokenizer(config: PipelineConfig, documents: Manifest) -> Manifest:
    """tokenizer/tokenizer.model, trained on the training split, or the one that is given; checked on the others."""
    given = given_tokenizer(config.tokenizer)
    stage = tokenizer_stage(config, documents, given)
    if done := stage.finished():
        return stage.cached(done)
    training, held_out = (
        documents.local_files(".parquet", "train/"),
        [*documents.local_files(".parquet", "test/"), *documents.local_files(".parquet", "validation/")],
    )
    with stage.workspace() as work, open_engine(config.engine, stage.progress) as engine:
        remove_partial(work)
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        if given:
            model = out / MODEL_FILE
            out.mkdir()
            shutil.copyfile(given, model)
            use = None
        else:
            model = train(training, config.tokenizer, config.seed, out, work / "training", engine)
            use = np.load(out / USE_FILE)
            stage.say_reuse(engine.reused, engine.made)
        stage.progress("checking the round trip")
        checked = chain(iter_documents(held_out), iter_documents(training))
        report = check_tokenizer(Tokenizer(model), checked, use, config.tokenizer)
        summary = (
            f"{report.vocab_size:,} pieces, {report.multi_word_piece_share:.0%} of them multi-word; "
            f"{report.tokens_per_byte:.3f} tokens a byte"
        )
        manifest = stage.complete(stage.publish(out), report.to_dict(), summary)
    pieces = ", ".join(f"`{example.strip()}`" for example in report.examples)
    create_markdown_artifact(
        f"Multi-word pieces: {pieces}", key=artifact_key("tokenizer", config.run_uri), description="Examples of pieces"
    )
    return manifest
