drawHeader();
drawByType();
drawByFamily();
drawByLength();
drawConfusion();
drawQuestions();
drawRuns();
