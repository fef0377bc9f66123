// Guides come before the API, and both before the pages that mention everything.
// The other values are Sphinx's own: a scorer replaces all of them.
var Scorer = {
  score: ([page, , , , score]) =>
    score - (/^(index|changelog|design)$/.test(page) ? 10 : page.startsWith("api") ? 3 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
