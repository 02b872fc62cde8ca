"""The languages that are told apart, and the right code for what people write instead."""

import re
from difflib import get_close_matches

# The labels of fastText's lid.176, each followed by other codes and names of its language, right and often mistaken.
_TABLE = """
af afr afrikaans; als gsw alemannic; am amh amharic; an arg aragonese; ar ara arb arabic; arz egyptian; as asm assamese;
ast asturian; av ava avaric; az aze azerbaijani; azb; ba bak bashkir; bar bavarian; bcl bik bikol; be bel belarusian;
bg bul bulgarian; bh bih bihari; bn ben bengali bangla; bo bod tib tibetan; bpy bishnupriya; br bre breton;
bs bos bosnian; bxr bua buryat; ca cat catalan; cbk chavacano; ce che chechen; ceb cebuano; ckb sorani; co cos corsican;
cs ces cze cz czech; cv chv chuvash; cy cym wel welsh; da dan dk danish; de deu ger german deutsch; diq zza zazaki; dsb;
dty doteli; dv div dhivehi; el ell gre gr greek; eml emilian; en eng english; eo epo esperanto; es spa spanish;
et est estonian; eu eus baq basque; fa fas per pes persian farsi; fi fin finnish; fr fra fre french; frr;
fy fry frisian; ga gle irish; gd gla gaelic; gl glg galician; gn grn guarani; gom kok konkani; gu guj gujarati;
gv glv manx; he heb iw hebrew; hi hin hindi; hif; hr hrv croatian; hsb; ht hat haitian; hu hun hungarian;
hy hye arm armenian; ia ina interlingua; id ind indonesian; ie ile interlingue; ilo ilocano; io ido; is isl icelandic;
it ita italian; ja jpn jp japanese; jbo lojban; jv jav jw javanese; ka kat geo georgian; kk kaz kazakh; km khm khmer;
kn kan kannada; ko kor korean; krc karachay; ku kur kmr kurdish; kv kom kpv komi; kw cor cornish; ky kir kyrgyz;
la lat latin; lb ltz luxembourgish; lez lezgian; li lim limburgish; lmo lombard; lo lao; lrc luri; lt lit lithuanian;
lv lav lvs latvian; mai maithili; mg mlg malagasy; mhr chm mari; min minangkabau; mk mkd mac macedonian;
ml mal malayalam; mn mon khk mongolian; mr mar marathi; mrj; ms msa may zsm malay; mt mlt maltese; mwl mirandese;
my mya bur burmese; myv erzya; mzn mazanderani; nah nahuatl; nap neapolitan; nds; ne nep npi nepali; new newari;
nl nld dut dutch flemish; nn nno nynorsk; no nor nb nob norwegian; oc oci occitan; or ori ory odia oriya;
os oss ossetian; pa pan punjabi; pam pampanga; pfl palatine; pl pol polish; pms piedmontese; pnb; ps pus pashto;
pt por portuguese; qu que quechua; rm roh romansh; ro ron rum mo romanian moldovan; ru rus russian; rue rusyn;
sa san sanskrit; sah yakut; sc srd sardinian; scn sicilian; sco scots; sd snd sindhi; sh hbs; si sin sinhala;
sk slk slo slovak; sl slv slovenian slovene; so som somali; sq sqi alb albanian; sr srp scc serbian; su sun sundanese;
sv swe swedish; sw swa swh swahili; ta tam tamil; te tel telugu; tg tgk tajik; th tha thai; tk tuk turkmen;
tl tgl fil tagalog filipino; tr tur turkish; tt tat tatar; tyv tuvan; ug uig uyghur; uk ukr ua ukrainian; ur urd urdu;
uz uzb uzn uzbek; vec venetian; vep veps; vi vie vn vietnamese; vls; vo vol volapuk; wa wln walloon; war waray; wuu;
xal kalmyk; xmf mingrelian; yi yid ji yiddish; yo yor yoruba; yue cantonese; zh zho chi cmn cn chinese mandarin
"""
_NAMES = {code: names for code, *names in map(str.split, _TABLE.split(";"))}

LANGUAGES = frozenset(_NAMES)
"""Codes of two letters where ISO 639 has one; als, bh and eml are Wikipedia's."""


def checked_language(code: str) -> str:
    """Returns the code.

    Raises:
        ValueError: It is none of LANGUAGES; names the right one if there is one: en for eng, English and en-US.
    """
    if code in LANGUAGES:
        return code
    right = _right_code(code.strip().lower())
    hint = f"use {right}" if right else "the codes are those of fastText's lid.176, such as en, de or zh"
    raise ValueError(f"{code!r} is no code of a language that can be told apart; {hint}")


def _right_code(given: str) -> str | None:
    codes = {name: code for code, names in _NAMES.items() for name in (code, *names)}
    language = re.split("[-_]", given)[0]
    names = [name for name in codes if len(name) > 3]
    near = [name for name in (given, language) if name in codes] or get_close_matches(given, names, n=1, cutoff=0.8)
    return codes[near[0]] if near else None
