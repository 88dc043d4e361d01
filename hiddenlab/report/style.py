"""Hold the style sheet of the report's pages: narrow and wide screens, light and dark."""

STYLE = """\
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --soft: #565c65; --line: #d5d9df; --tint: #f3f5f7;
  --link: #0b57a4; --wrong: #8f1414; --wrong-tint: #fde8e6; --wrong-line: #c62828; --open: #5c4300;
  --open-line: #8a6100; --bar: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --ink: #e8eaed; --soft: #adb4bd; --line: #3a4048; --tint: #1f2328; --link: #8ab8ff;
    --wrong: #ffb8b0; --wrong-tint: #47191a; --wrong-line: #ff8a80; --open: #f2d27a; --open-line: #d9b44a;
    --bar: #56b4e9; }
}
* { box-sizing: border-box; }
body { font: 1rem/1.6 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem 1rem 4rem;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 .5rem; }
h4 { font-size: .85rem; margin: 0; color: var(--soft); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, ul, dl { margin: .5rem 0; }
ul { padding-left: 1.2rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
main:focus { outline: none; }
.skip { position: absolute; left: -99rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--paper); padding: .3rem .6rem; z-index: 1; }
.sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap;
  user-select: none; }
code { font-family: ui-monospace, monospace; font-size: .9em; background: var(--tint); padding: 0 .25em; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; margin: 1rem 0; }
.said { font-size: 1.1rem; margin: 0; }
.meter { height: .6rem; background: var(--tint); border: 1px solid var(--soft); border-radius: .3rem;
  margin: .6rem 0; overflow: hidden; }
.meter span { display: block; height: 100%; background: var(--bar); }
dl.main { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .5rem 1rem; }
dt { color: var(--soft); font-size: .85rem; line-height: 1.3; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; margin: .75rem 0; }
.wide img { display: block; min-width: 40rem; max-width: 100%; height: auto; margin: .5rem auto; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; width: 100%; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; font-weight: 400;
  white-space: nowrap; }
thead th { font-weight: 600; border-bottom: 2px solid var(--soft); vertical-align: bottom; white-space: normal;
  min-width: 7rem; }
thead th.key { min-width: 0; }
tbody tr:last-child > * { border-bottom: 0; }
.key { text-align: left; }
.long { white-space: normal; min-width: 16rem; }
.note { color: var(--soft); font-size: .875rem; }
.paper { color: var(--soft); }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--link); }
pre { background: var(--tint); padding: .5rem .7rem; white-space: pre-wrap; font-size: .8rem; border-radius: .3rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: .5rem 1.5rem;
  margin: .5rem 0; }
.prompt { border-top: 1px solid var(--line); padding: .6rem 0; }
.prompt .id { color: var(--soft); font-size: .85rem; margin: 0; }
.prompt .id strong { color: var(--ink); }
.text { font-family: ui-monospace, monospace; font-size: .9rem; white-space: pre-wrap; margin: .2rem 0; }
.text, .id, td, th, summary, code { unicode-bidi: isolate; }
.wrong { color: var(--wrong); background: var(--wrong-tint); font-weight: 600;
  text-decoration: underline wavy var(--wrong-line) 1.5px; text-underline-offset: .2em; }
.wrong::before { content: "\\2717" / ""; font-size: .8em; display: inline-block; padding: 0 .15em; }
.unverified { color: var(--open); text-decoration: underline dotted var(--open-line) 2px;
  text-underline-offset: .2em; }
.missing { color: var(--soft); background: var(--tint); border: 1px dashed var(--soft); padding: 0 .15em; }
.na { color: var(--soft); font-style: italic; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; list-style: none; padding: 0; }
.legend .text { margin: 0; }
@media print { .wide { overflow: visible; border: 0; } }
"""
