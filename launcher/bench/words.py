"""Common English words, most of which are one token to most tokenizers: what prompts of a given length are made of."""

from __future__ import annotations

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name president team minute idea body information back parent
face others level office door health person art war history party result change morning reason research girl guy
moment air teacher force education good new first last long great little own other old big high different small
large next early young important few public bad same able be have do say get make go know take see come think
look want give use find tell ask seem feel try leave call keep let begin help show hear play run move live
believe hold bring happen write provide sit stand lose pay meet include continue set learn lead understand watch
follow stop create speak read allow add spend grow open walk win offer remember love consider appear buy wait
serve die send expect build stay fall cut reach kill remain suggest raise pass sell require report decide pull
the and that for not with you this but his from they she which would there their what about out who if will more
when can no just him into your some could them than then now only its over also after two how our well even
because any these most us between need through under never while where much before too mean against such very
still must might always today street church table paper music market food field wind rain snow river sea stone
tree bird fish dog horse red green blue black white brown gold silver glass iron wood north south east west
summer winter spring king queen island bridge road town village garden kitchen window light dark cold warm hot
dry wet fast slow hard soft deep wide short tall strong weak rich poor happy sad quiet loud clean safe free full
empty true simple clear
"""
WORDS = tuple(_TEXT.split())
