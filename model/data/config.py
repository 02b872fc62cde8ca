"""From raw text to tokens: the configuration sections of documents, tokenizer and token shards."""

import codecs
from math import fsum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from model.config import Fraction, Section
from model.data.filtering.language_codes import checked_language

Share = Annotated[float, Field(ge=0, le=1)]

MAX_BOUND = 1_000_000_000
"""More words or characters than a document has."""

MIXTURE_PLACES = 1 << 16
"""Places that the sources' weights share out among them; each source needs one."""

CANDIDATE_PROBABILITY = 0.999
"""Least probability with which near duplicates at the threshold must be found by their MinHash bands."""


class SourceConfig(Section):
    """One place that text comes from."""

    uri: str = Field(
        min_length=1,
        title="URI or glob",
        description="Path, file: or s3:// URI, or package:NAME/PATH for files in an installed package; * and ** match. "
        "Read as .jsonl, .json, .csv, .tsv, .txt, .html, .parquet, .arrow, .warc or .wet; plain, .gz, .zst, .bz2, .xz.",
    )
    name: str = Field("", description="Name in the reports; empty means the last folder of the URI.")
    text_fields: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        ("text",),
        min_length=1,
        description="Fields or columns that hold the text, joined by an empty line; a.b is field b of object a.",
    )
    txt_document: Literal["file", "line"] = Field("file", description="What one document is in a .txt file.")
    encoding: str = Field("", description="Character encoding of text files; empty means that it is detected.")
    weight: float | None = Field(
        None,
        ge=1e-9,
        le=1e15,
        description="Share of the training tokens, relative to the other sources' weights; for all sources or none.",
    )

    @model_validator(mode="before")
    @classmethod
    def _bare_uri(cls, value: Any) -> Any:
        return {"uri": value} if isinstance(value, str) else value

    @field_validator("text_fields", mode="before")
    @classmethod
    def _bare_field(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            # Python also knows codecs that make no text (base64), and some that cannot replace what they cannot read.
            bytes(4).decode(value or "utf-8", errors="replace")
            return codecs.lookup(value).name if value else ""
        except (LookupError, UnicodeError):
            raise ValueError(f"{value!r} is no encoding of text that Python knows") from None


class CleaningConfig(Section):
    """How a document's text is repaired before it is judged."""

    repair: bool = Field(True, description="Repair text that was decoded with the wrong encoding (ftfy).")
    normalization: Literal["none", "NFC", "NFKC"] = Field("none", description="Unicode normalisation.")
    redact: tuple[Literal["email", "ip"], ...] = Field(
        (), description="Replace e-mail addresses ('email') and public IP addresses ('ip') with placeholders."
    )


class GopherConfig(Section):
    """Source: Rae et al. 2021, arXiv:2112.11446, appendix A.1: quality and repetition filters."""

    enabled: bool = Field(True, description="Apply these rules.")
    min_words: int = Field(50, ge=0, le=MAX_BOUND, description="Fewest words.")
    max_words: int = Field(100_000, ge=1, le=MAX_BOUND, description="Most words.")
    min_mean_word_chars: float = Field(3.0, ge=0, le=MAX_BOUND, description="Least mean word length.")
    max_mean_word_chars: float = Field(10.0, gt=0, le=MAX_BOUND, description="Greatest mean word length.")
    max_symbols_per_word: float = Field(0.1, ge=0, le=MAX_BOUND, description="Most '#' or ellipses per word.")
    max_bullet_lines: Share = Field(0.9, description="Most lines that start with a bullet.")
    max_ellipsis_lines: Share = Field(0.3, description="Most lines that end with an ellipsis.")
    min_alphabetic_words: Share = Field(0.8, description="Least share of words with an alphabetic character.")
    min_stop_words: int = Field(
        2, ge=0, le=8, description="Fewest of the, be, to, of, and, that, have, with; in English."
    )
    max_duplicate_lines: Share = Field(0.3, description="Most lines that repeat an earlier line.")
    max_duplicate_line_chars: Share = Field(0.2, description="Most characters in such lines.")
    max_duplicate_paragraphs: Share = Field(0.3, description="Most paragraphs that repeat an earlier paragraph.")
    max_duplicate_paragraph_chars: Share = Field(0.2, description="Most characters in such paragraphs.")
    max_top_ngram_chars: tuple[Share, Share, Share] = Field(
        (0.20, 0.18, 0.16), description="Most characters in the most frequent 2-, 3- and 4-gram of words."
    )
    max_duplicate_ngram_chars: tuple[Share, Share, Share, Share, Share, Share] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
        description="Most characters in 5- to 10-grams of words that occur more than once.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for low, high in (("min_words", "max_words"), ("min_mean_word_chars", "max_mean_word_chars")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} ({getattr(self, low)}) must not exceed {high} ({getattr(self, high)})")
        return self


class C4Config(Section):
    """Source: Raffel et al. 2020, JMLR 21(140), section 2.2; its list of bad words is not shipped."""

    enabled: bool = Field(False, description="Apply these rules.")
    min_words_per_line: int = Field(5, ge=0, le=MAX_BOUND, description="Shorter lines are removed, in words.")
    terminal_punctuation: bool = Field(True, description="Remove lines that end without . ! ? or a closing quote.")
    remove_notices: bool = Field(True, description="Remove lines about JavaScript, cookies and terms of use.")
    min_sentences: int = Field(3, ge=0, le=MAX_BOUND, description="Fewest sentences of a document.")
    forbid_lorem_ipsum: bool = Field(True, description="Drop documents with the words 'lorem ipsum'.")
    forbid_curly_brackets: bool = Field(True, description="Drop documents with a curly bracket.")
    bad_words: str = Field(
        "", description="A file with a word or phrase a line: drop documents that hold one; empty drops none."
    )


class FineWebConfig(Section):
    """Source: Penedo et al. 2024, arXiv:2406.17557, section 3.6; newlines per word: datatrove's filter."""

    enabled: bool = Field(False, description="Apply these rules.")
    min_punctuated_lines: Share = Field(
        0.12, description="More lines than this share end with punctuation; 0 asks for none."
    )
    max_short_lines: Share = Field(
        0.67, description="Fewer lines than this share have under 30 characters; 1 allows all."
    )
    max_duplicate_line_chars: Share = Field(
        0.1, description="Less than this share of the characters is in lines that repeat an earlier line; 1 allows all."
    )
    max_newlines_per_word: float = Field(0.3, ge=0, le=MAX_BOUND, description="Most newlines per word.")


class FilterConfig(Section):
    """Rules that a document must meet; what is dropped is counted by the rule that dropped it."""

    min_chars: int = Field(200, ge=1, le=MAX_BOUND, description="Shortest document, in characters after cleaning.")
    max_chars: int = Field(5_000_000, ge=1, le=MAX_BOUND, description="Longest document, in characters after cleaning.")
    languages: tuple[Annotated[str, AfterValidator(checked_language)], ...] = Field(
        (), description="Languages to keep, as ISO 639 codes such as en; empty keeps all."
    )
    min_language_score: Share = Field(0.65, description="Least certainty of the language, where languages are given.")
    gopher: GopherConfig = Field(GopherConfig(), title="Gopher", description="Gopher's quality and repetition rules.")
    c4: C4Config = Field(C4Config(), title="C4", description="C4's rules, for web pages.")
    fineweb: FineWebConfig = Field(FineWebConfig(), title="FineWeb", description="FineWeb's rules, for web pages.")
    score_only: bool = Field(
        False,
        description="Drop and change nothing by these rules: choose thresholds from the report's histograms first.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars ({self.min_chars}) must not exceed max_chars ({self.max_chars})")
        return self


class DeduplicationConfig(Section):
    """Near duplicates: MinHash over word n-grams, candidates by locality-sensitive hashing, verified exactly.

    Source: Broder 1997, "On the resemblance and containment of documents"; Lee et al. 2022, arXiv:2107.06499.
    """

    near_duplicates: Literal["remove", "keep"] = Field(
        "remove", description="'keep' leaves them in the corpus, all of a group in one split."
    )
    min_jaccard: float = Field(0.8, gt=0, lt=1, description="Documents whose n-gram sets are this similar are near.")
    ngram_words: int = Field(5, ge=1, le=32, description="Words in an n-gram.")
    num_hashes: int = Field(128, ge=16, le=1024, description="Length of a MinHash signature.")
    repeated_paragraphs: bool = Field(False, description="Remove paragraphs that an earlier document has.")
    min_paragraph_words: int = Field(10, ge=1, description="Shorter paragraphs may repeat.")

    @model_validator(mode="after")
    def _enough_hashes(self) -> Self:
        if 1 - (1 - self.min_jaccard) ** self.num_hashes < CANDIDATE_PROBABILITY:
            raise ValueError(
                f"num_hashes ({self.num_hashes}) is too small to find pairs at min_jaccard ({self.min_jaccard}) "
                f"with a probability of {CANDIDATE_PROBABILITY}"
            )
        return self


class DecontaminationConfig(Section):
    """Cuts what the evaluation files hold out of the training text.

    Source: Brown et al. 2020, arXiv:2005.14165, appendix C: n-gram overlap, a window around it, a limit of cuts, and
    n-grams that many documents have left in.
    """

    enabled: bool = Field(True, description="Look for the texts of all evaluation files of the run.")
    ngram_words: int = Field(13, ge=5, le=64, description="Words of an overlap; shorter examples are matched whole.")
    min_words: int = Field(8, ge=1, description="Examples of fewer words are not looked for.")
    window_chars: int = Field(200, ge=0, description="Characters cut before and after an overlap; least rest to keep.")
    max_cuts: int = Field(10, ge=0, description="A document with more overlaps is dropped whole.")
    max_documents: int = Field(
        10,
        ge=1,
        description="An n-gram that more documents have, duplicates aside, stays in: it is a common phrase, or "
        "boilerplate. A whole example never stays.",
    )


class DataConfig(Section):
    """From raw text to documents."""

    sources: tuple[SourceConfig, ...] = Field(
        (), description="Where the text comes from, in this order: URIs, or objects with uri, name, text_fields …"
    )
    cleaning: CleaningConfig = Field(CleaningConfig(), title="Cleaning", description="How text is repaired.")
    filters: FilterConfig = Field(FilterConfig(), title="Filters", description="Rules that a document must meet.")
    deduplication: DeduplicationConfig = Field(
        DeduplicationConfig(), title="Deduplication", description="What counts as the same document."
    )
    decontamination: DecontaminationConfig = Field(
        DecontaminationConfig(), title="Decontamination", description="Keeps evaluation texts out of the corpus."
    )
    validation_fraction: Fraction = Field(0.02, description="Share of documents held out for validation in training.")
    test_fraction: Fraction = Field(0.02, description="Share of documents held out for the final evaluation.")
    max_document_bytes: int = Field(
        64 << 20, ge=1 << 10, description="Longest raw record in bytes; a longer one is dropped and counted."
    )
    shard_bytes: int = Field(
        64 << 20, ge=1 << 16, description="Bytes of source files that are worked on at once, and text bytes of a shard."
    )

    @field_validator("sources", mode="before")
    @classmethod
    def _bare_source(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _leaves_training_data(self) -> Self:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"validation_fraction ({self.validation_fraction}) + test_fraction ({self.test_fraction}) "
                "must leave documents to train on"
            )
        return self

    @model_validator(mode="after")
    def _weights_can_be_met(self) -> Self:
        without = [source.uri for source in self.sources if source.weight is None]
        if without and len(without) < len(self.sources):
            raise ValueError(f"sources: weight is given for some, but not for {without[0]!r}; give it for all or none")
        total = fsum(source.weight or 0 for source in self.sources)
        for source in self.sources:
            if source.weight is not None and source.weight * MIXTURE_PLACES < total:
                raise ValueError(
                    f"sources: the weight of {source.name or source.uri!r} ({source.weight:g}) must be at least "
                    f"1/{MIXTURE_PLACES} of the sum of all weights ({total:g})"
                )
        return self


class TokenizerConfig(Section):
    """The vocabulary: SentencePiece unigram with multi-word pieces and byte fallback."""

    uri: str = Field("", description="An existing tokenizer.model to use; empty means that one is trained.")
    vocab_size: int = Field(8192, ge=300, le=262_144, description="Pieces, control and byte pieces included.")
    method: Literal["phrases", "direct"] = Field(
        "phrases",
        description="'phrases' mines words and word groups and trains on them; 'direct' trains on lines: slow, "
        "for small vocabularies and comparison.",
    )
    sample_bytes: int = Field(
        256 << 20,
        ge=1 << 10,
        description="Most text bytes to train on, sampled evenly over all training documents; with 'direct', memory "
        "and time grow with it.",
    )
    max_piece_chars: int = Field(32, ge=4, le=128, description="Longest piece, in characters.")
    max_phrase_words: int = Field(
        4, ge=1, le=8, description="Most words in one piece, a run of punctuation being one; 1 means words only."
    )
    min_phrase_count: int = Field(10, ge=2, description="Least occurrences of a word group that may become a piece.")
    reserved_pieces: int = Field(0, ge=0, le=1024, description="Control pieces kept free for later use.")
    round_trip_documents: int = Field(200, ge=1, description="Documents that must decode to exactly what was encoded.")
    max_tokens_per_byte: float = Field(
        0.5, gt=0, le=1, description="The gate: the run fails when held-out text needs more tokens a byte than this."
    )

    @model_validator(mode="after")
    def _leaves_pieces_to_learn(self) -> Self:
        if self.vocab_size - self.reserved_pieces < 300:
            raise ValueError(
                f"reserved_pieces ({self.reserved_pieces}) must leave 300 of vocab_size ({self.vocab_size}) to learn"
            )
        return self


class TokensConfig(Section):
    """Token shards and the order in which training reads them."""

    max_epochs: float = Field(
        4.0, gt=0, description="Most times that training may read one source; more is refused, never done silently."
    )
