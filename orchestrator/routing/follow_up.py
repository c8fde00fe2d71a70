"""What a conversation asks for, where its last turn does not say it: "yes, do it" and a tool's result stay with the
task.

A classifier reads what is there, and in "go on" there is nothing. So a last turn that says nothing of its own is left
out, and one of few words, or that answers what the assistant asked, is read as part of the task. Thanks, a question and
longer turns are a turn as they stand. In doubt a turn belongs to the task, and of two tasks both are read.

It is done by words, in five languages: a turn says nothing of its own if all of its words are listed here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from orchestrator.routing.conversation import Turn, find_task

# Longer turns have something to say, whatever their words; a sign of Chinese counts as half a word.
MAX_WORDS = 16
# No longer is what only adds to a task, and what answers a question of the assistant's.
MAX_ADDED_WORDS = 5
MAX_ANSWER_WORDS = 8


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Without accents and apostrophes. They want more of what there is.
_GO_ON = _words(
    """
    again answer asked begin carry comes forgot mistake missing wrong stopped complete continue continued
    continuing deliver do doing draft elaborate execute expand
    explain extend finalise finalize finish fix give go going goon implement keep lets more next proceed
    produce provide
    redo remaining repeat rest resume retry send shoot show solve start try write yeah yep yes yup sure absolutely
    definitely certainly agreed approved confirmed correct exactly yea ye pls
    ausfuhren ausfuhrlich beginne beantworte erledige fang fange fahr fahre fertig fortfahren fortsetzen genau
    gerne gern
    ja jawohl komplett leg lege los losen lose mach mache machs nachste nachsten nachster nachstes naechste
    naechster nochmal repariere richtig schreib schreibe sicher starte stimmt tu versuch versuche vollende weiter
    weitermachen zeig zeige
    adelante adelanta acaba anda completa comienza continua continue correcto corrige dale desarrolla desarrollalo
    empieza escribe escribelo exacto hagalo hazlo haz intenta intentalo otra procede prosigue repite resuelve
    resuelvelo
    despues si seguir siga sigue siguiente termina terminalo venga vuelve
    allez allons apres ensuite commence commencez continuez corrige developpe encore essaie essayez exactement
    fais faites finis
    finissez oui ouais poursuis poursuivez procede procedez recommence reponds redige reessaie resous suivant
    suivante
    termine terminez vas volontiers
    """
)
# They say how or of what, but not what of: nothing by themselves.
_FILLERS = _words(
    """
    a ahead all alright am an and any are as at away be been bit by can cool could course described did
    discussed
    done earlier end entire every everything fine first for from full fully further good got have here hmm how
    i id if im in incomplete into is isnt it its ive just kindly last left let like little make me my nice
    not now of off ok okay okey okie on one ones original out over part parts perfect piece please point
    planned proposed
    properly question read ready really request right same section should so solution some sounds step steps
    still stopped
    suggested suggestion task text that thats the them then there these they thing things this those through time to
    together too two until up us version very want was way we well were what whatever whats where whole will
    with wont
    wait work works would you your youre yourself great answers result proof code plan details detail
    awesome beautiful brilliant excellent lovely wonderful wow
    klasse prima toll
    also aber alle alles als an auf aufgabe aus bis bitte da dann das dass dein deine deinen dem den der des
    die dies
    diese dieses dir doch dort du ein eine einem einen einer er erste ersten es falsch frage fur ganze ganzen
    gut hier
    ich im in ist jetzt kannst konntest losung mal mein meine meinen mir mit nun nur ok okay passt schritt
    schritte so
    soll super teil text und uns von vorgeschlagen war wie wir wo zum zur ende rest klar
    genial estupendo
    acuerdo ahi ahora al asi bien bueno claro como con cosa de del dejaste desde donde el ella ello en
    entonces era esa ese
    eso esta estaba este esto favor fin final la las le les lo los luego mal me mi mis misma mismo muy no nos o okay
    paso pasos para parte perfecto perfecta por porfa primera primero pregunta pues puedes que resto se solucion
    su tal tarea te toda todo tu tus un una vale vamos ve vez y ya
    nickel
    accord alors au aux avec bien ca car ce cela ces cest cette comme dac daccord dans de des donc du
    elle en est
    et etape etapes etait faire faux il je jusqua la le les leur lui ma mais me meme moi mon ne non nous ou
    parfait par
    partie pas peux plait pour premiere premier puis quand que question qui reste sa se si sil solution son
    sont stp suite
    sur svp ta tache te tes ton tous tout toute toutes tres tu un une va voila vous votre y
    """
)
# They end it; with a word of the first list beside them, only so far: "thanks, go on".
_THANKS = _words(
    """
    appreciate appreciated bye bravo cheers enough goodbye goodnight night ta thank thanks thankyou thnx thx tysm ty
    ciao danke dank dankeschon servus tschuss tschuess wiedersehen
    adios chao chau gracias hasta
    adieu merci revoir remercie salut
    """
)
# They say that it was heard, and no more.
_HEARD = _words(
    "ah ahh alright cool fine good got great i it lovely makes nice oh ok okay perfect right see sense then wow vale"
)
_QUESTIONS = _words(
    """
    what whats when where which who whos whom whose why how hows
    was wann wer wo wohin welche welcher welches warum wieso weshalb wieviel wozu wie
    que cual cuales cuando cuanto cuanta cuantos cuantas donde quien como
    quoi quel quelle quels quelles quand combien pourquoi comment qui
    """
)

# Chinese has no spaces: what a turn may be made of.
_GO_ON_SIGNS = _words(
    """
    接下来 继续 接着 往下 下一 开始 重新 再来 再试 重试 重做 完成 做完 写完 完整 照做 就这么 这么
    是的 对的 没错 同意 可以 当然 需要 要的 写出 修正 改正 展开 详细 全部 整个 剩下 做 写
    试 改 是 对 要 行 来
    """
)
_FILLER_SIGNS = _words(
    """
    好的 好吧 请你 麻烦 一下 一遍 一步 步骤 部分 这个 那个 那么 现在 然后 这样 我们 问题 答案
    解答 证明 内容 任务 第一 刚才 之前 错了 不对 给我 出来 下去 一部 按照 方案 计划 好 请
    吧 啊 呀 了 的 就 把 它 你 我 那 这 再 都 也 去 一 步
    部 分 些 给 出 下 完 按 嗯 哦 着 说 个 点 呢
    """
)
_THANKS_SIGNS = ("谢谢", "感谢", "多谢", "谢", "再见", "拜拜", "晚安", "辛苦")
_SIGNS = re.compile("|".join(sorted(_GO_ON_SIGNS | _FILLER_SIGNS, key=len, reverse=True)))
_GO_ON_SIGN = re.compile("|".join(_GO_ON_SIGNS))
_HEARD_SIGN = re.compile("收到|明白|知道|懂|原来|如此|好|的|了|嗯|哦|噢|嘞|吧|我")
_THANKS_SIGN = re.compile("|".join(_THANKS_SIGNS))

_CHINESE = re.compile("[\u3400-\u9fff]")
_WORD = re.compile(r"[^\W_]+")
_ASKS = re.compile(r"[?？]\W*$")
_CLAUSE = re.compile("[,.;:!，。；：！\n]+")
# It says that the caller will.
_PROMISE = re.compile(r"\bwill do\b")
# A longer turn is not looked at, for it has something to say; nor are earlier ones of the user's than so many.
_MAX_CHARACTERS = 200
_MAX_TURNS = 50


def find_ask(turns: Sequence[Turn]) -> list[Turn]:
    """The conversation up to the turn that says what is wanted, with what was answered since; the same if that is last.

    What follows the last user's turn, as tools' results do, is left out.
    """
    users = [place for place, turn in enumerate(turns) if turn.role == "user"][-_MAX_TURNS:]
    if not users:
        return list(turns)
    last = begin = users[-1]
    if len(users) > 1 and goes_on(turns[last].text):
        begin = min(_walk_back(turns, users[:-1]), find_task(turns[:last]) or 0)
    elif adds_to_task(turns, last):
        begin = _walk_back(turns, users)
    if begin == last:
        return list(turns[: last + 1])
    since = (turns[place].text for place in users if place > begin)
    said = [text for text in since if not (goes_on(text) or is_thanks(text))]
    return [*turns[:begin], Turn("user", "\n".join([turns[begin].text, *said]))]


def _walk_back(turns: Sequence[Turn], users: Sequence[int]) -> int:
    """The latest user's turn that is a request."""
    for place in reversed(users[1:]):
        if not (goes_on(turns[place].text) or is_thanks(turns[place].text) or adds_to_task(turns, place)):
            return place
    return users[0]


def goes_on(text: str) -> bool:
    """Whether a user's turn wants what was asked before, and says nothing of its own."""
    words, signs = _read(text)
    if not 0 < len(words) + len(signs) / 2 <= MAX_WORDS:
        return False
    if not all(word in _GO_ON or word in _FILLERS or word in _THANKS or word.isdigit() for word in words):
        return False
    if _SIGNS.sub("", _THANKS_SIGN.sub("", signs)):
        return False
    if any(word in _GO_ON for word in words) or _GO_ON_SIGN.search(_THANKS_SIGN.sub("", signs)):
        return True
    return bool(_ASKS.search(text))  # "and then?"


def is_thanks(text: str) -> bool:
    """Whether a short turn ends the matter, or says no more than that it was heard."""
    words, signs = _read(text)
    if not 0 < len(words) + len(signs) / 2 <= MAX_WORDS or goes_on(text):
        return False
    if any(word in _THANKS for word in words) or _THANKS_SIGN.search(signs):
        return True
    return _HEARD.issuperset(words) and not _HEARD_SIGN.sub("", signs)


def adds_to_task(turns: Sequence[Turn], place: int) -> bool:
    """Whether the user's turn there answers a question of the assistant's, or is too short for a request of its own."""
    text = turns[place].text
    if place == 0 or is_thanks(text) or _ASKS.search(text):
        return False
    is_asked = turns[place - 1].role == "assistant" and _ASKS.search(turns[place - 1].text[-20:])
    words, signs = _read(text)
    if not 0 < len(words) + len(signs) / 2 <= (MAX_ANSWER_WORDS if is_asked else MAX_ADDED_WORDS):
        return False
    return not any(_QUESTIONS.intersection(_read(clause)[0][:2]) for clause in _CLAUSE.split(text))


def _read(text: str) -> tuple[list[str], str]:
    """The words, without case, accents and apostrophes, and the signs of Chinese. Of a long text too many, or none."""
    if len(text) > _MAX_CHARACTERS:
        return [], ""
    signs = "".join(_CHINESE.findall(text))
    plain = _PROMISE.sub("", _CHINESE.sub(" ", text).casefold()).replace("'", "").replace("’", "").replace("ß", "ss")
    plain = "".join(each for each in unicodedata.normalize("NFKD", plain) if not unicodedata.combining(each))
    return _WORD.findall(plain), signs
